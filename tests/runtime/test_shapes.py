"""One kernel serves every shape, and offsets do not stop at 2^31."""

from __future__ import annotations

import mmap
import sys

import numpy as np
import pytest
import tvm
from tvm import ir, tirx

import sparsetir
from programs import PROGRAMS, tolerance
from small import making, small
from sparsetir.sparse_ir.nodes import walk

CUDA = {"kind": "cuda", "arch": "sm_80"}
FAR = 2**31 + 11  # an element that 32-bit offsets do not reach

requires_sparse_memory = pytest.mark.skipif(
    sys.platform != "linux", reason="needs memory that is only there where it is touched"
)


def virtual(shape, dtype):
    """Zeros that take no memory until they are touched."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)


# -- one kernel, many graphs --------------------------------------------------------------------


def test_one_build_serves_ten_graphs(monkeypatch):
    compilations = []
    compile_ = tvm.compile

    def counting(*args, **kwargs):
        compilations.append(args)
        return compile_(*args, **kwargs)

    monkeypatch.setattr(tvm, "compile", counting)
    rng = np.random.default_rng(0)
    spmm = PROGRAMS["spmm"]
    kernel = sparsetir.build(spmm.make("float32", "int32"))
    for _ in range(10):
        m, n, feat = (int(x) for x in rng.integers(1, 60, 3))
        mask = rng.random((m, n)) < rng.uniform(0, 0.5)
        args = {
            "a": rng.random(mask.sum(), "float32"),
            "b": rng.random((n, feat), "float32"),
            "c": np.full((m, feat), np.nan, "float32"),
            "indptr": np.concatenate([[0], mask.sum(axis=1).cumsum()]).astype("int32"),
            "indices": np.nonzero(mask)[1].astype("int32"),
        }
        kernel(**args)
        dense = np.zeros((m, n))
        dense[mask] = args["a"]
        np.testing.assert_allclose(args["c"], dense @ args["b"], **tolerance("float32"))
    assert len(compilations) == 1


# -- offsets past 2^31 --------------------------------------------------------------------------


def accesses(func, *names):
    """(buffer, dtype of its one index) of each load and store."""
    found = []

    def visit(node):
        if isinstance(node, ir.TensorLoad) and node.source.name in names:
            found.append((node.source.name, *(str(i.ty.dtype) for i in node.indices)))
        elif isinstance(node, tirx.BufferStore) and node.buffer.name in names:
            found.append((node.buffer.name, *(str(i.ty.dtype) for i in node.indices)))

    walk(func.body, visit)
    return found


@pytest.mark.parametrize("target", [None, "llvm", CUDA], ids=["unscheduled", "llvm", "cuda"])
def test_offsets_are_64_bit_although_sizes_are_32_bit(target):
    func = sparsetir.lower_sparse_iter(PROGRAMS["spmm"].make("float32", "int32"))
    if target is not None:
        func = sparsetir.default_schedule(func, tvm.target.Target(target))
    found = accesses(sparsetir.lower_sparse_buffer(func), "B", "C")
    assert set(found) == {("B", "int64"), ("C", "int64")}


def products_of_sizes(func):
    """32-bit products of two parameters."""
    found = []

    def visit(node):
        if isinstance(node, tirx.Mul) and str(node.ty.dtype) == "int32":
            if isinstance(node.a, ir.Var) and isinstance(node.b, ir.Var):
                found.append(str(node))

    walk(func, visit)
    return found


@pytest.mark.parametrize("target", ["llvm", CUDA], ids=["llvm", "cuda"])
def test_no_loop_counts_to_a_32_bit_product_of_sizes(target):
    double = small("double", """
with T.sp_iter([I, J], "SS", "double") as [i, j]:
    Y[i, j] = X[i, j] + X[i, j]
""", "J = T.dense_fixed(n)", "int8", X="I J", Y="I J")  # fmt: skip

    func = sparsetir.default_schedule(
        sparsetir.lower_sparse_iter(double), tvm.target.Target(target)
    )
    assert not products_of_sizes(sparsetir.lower_sparse_buffer(func))


make_gather = making("gather", """
with T.sp_iter([I, J, K], "SRS", "gather") as [i, j, k]:
    with T.init():
        Y[i, k] = T.int8(0)
    Y[i, k] = Y[i, k] + B[j, k]
""", B="N K int8", Y="I K int8")  # fmt: skip
make_scatter = making("scatter", """
with T.sp_iter([O, I, K], "SSS", "scatter") as [o, i, k]:
    Y[i, k] = X[o, i, k]
""", """
O = T.dense_fixed(1)
I = T.sparse_variable(O, (m, stored), (indptr, rows))
M = T.dense_fixed(m)
""", X="O I K int8", Y="M K int8")  # fmt: skip
# The first four elements of each ragged row.
make_heads = making("heads", """
with T.sp_iter([I, K], "SS", "heads") as [i, k]:
    Y[i, k] = A[i, k]
""", """
J = T.dense_variable(I, (n, nnz), indptr)
K = T.dense_fixed(4)
""", A="I J int8", Y="I K int8")  # fmt: skip


@requires_sparse_memory
@pytest.mark.parametrize("idtype", ["int32", "int64"])
def test_reads_past_two_to_the_31(idtype):
    n, feat = 2**21 + 7, 1024
    b = virtual((n, feat), "int8")
    assert b.size > 2**31
    rows = np.array([3, 2**21 - 1, 2**21 + 1, n - 1])
    b[rows] = np.random.default_rng(0).integers(-30, 30, (4, feat), "int8")
    indptr, indices = np.array([0, 2, 2, 4], idtype), rows.astype(idtype)
    y = np.full((3, feat), 77, "int8")
    sparsetir.build(make_gather("int8", idtype))(b=b, y=y, indptr=indptr, indices=indices)
    none = np.zeros(feat, "int8")
    np.testing.assert_array_equal(y, [b[rows[0]] + b[rows[1]], none, b[rows[2]] + b[rows[3]]])


@requires_sparse_memory
@pytest.mark.parametrize("idtype", ["int32", "int64"])
def test_writes_past_two_to_the_31(idtype):
    m, feat = 2**21 + 7, 1024
    y = virtual((m, feat), "int8")
    rows = np.array([0, 5, 2**21, m - 1], idtype)
    x = np.random.default_rng(1).integers(-99, 99, (4, feat), "int8")
    sparsetir.build(make_scatter("int8", idtype))(
        x=x, y=y, indptr=np.array([0, 4], idtype), rows=rows
    )
    np.testing.assert_array_equal(y[rows], x)
    assert not y[[1, 4, 6, 2**21 - 1, 2**21 + 1, m - 2]].any()


@requires_sparse_memory
def test_more_stored_elements_than_32_bits_count():
    indptr = np.array([0, 3, FAR, FAR, FAR + 5], "int64")
    a = virtual(FAR + 5, "int8")
    a[:7], a[FAR:] = np.arange(1, 8), np.arange(11, 16)
    y = np.full((4, 4), 77, "int8")
    sparsetir.build(make_heads("int8", "int64"))(a=a, y=y, indptr=indptr, n=FAR)
    np.testing.assert_array_equal(y, [[1, 2, 3, 0], [4, 5, 6, 7], [0] * 4, [11, 12, 13, 14]])


@requires_sparse_memory
def test_a_size_that_its_type_cannot_hold_is_refused():
    kernel = sparsetir.build(make_heads("int8", "int32"))
    args = {"y": np.zeros((1, 4), "int8"), "indptr": np.array([0, 5], "int32"), "n": 5}
    with pytest.raises(ValueError, match="heads: argument 'nnz': expected a number that int32 "):
        kernel(a=virtual(FAR, "int8"), **args)
