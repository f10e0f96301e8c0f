"""One kernel serves every shape, and offsets may exceed 2^31."""

from __future__ import annotations

import contextlib
import functools
import mmap
import sys

import numpy as np
import pytest
import torch
import tvm
from tvm import ir, s_tir, tirx

import sparsetir
from programs import PROGRAMS, copied, tolerance
from small import making, small
from sparsetir.sparse_ir.nodes import sparse_iterations, walk

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
    pairs = []

    def visit(node):
        if isinstance(node, ir.TensorLoad) and node.source.name in names:
            pairs.append((node.source.name, *(str(i.ty.dtype) for i in node.indices)))
        elif isinstance(node, tirx.BufferStore) and node.buffer.name in names:
            pairs.append((node.buffer.name, *(str(i.ty.dtype) for i in node.indices)))

    walk(func.body, visit)
    return pairs


@pytest.mark.parametrize("target", [None, "llvm", CUDA], ids=["unscheduled", "llvm", "cuda"])
def test_offsets_are_64_bit_although_sizes_are_32_bit(target):
    func = sparsetir.lower_sparse_iter(PROGRAMS["spmm"].make("float32", "int32"))
    if target is not None:
        func = sparsetir.default_schedule(func, tvm.target.Target(target))
    pairs = accesses(sparsetir.lower_sparse_buffer(func), "B", "C")
    assert set(pairs) == {("B", "int64"), ("C", "int64")}


def products_of_sizes(func):
    """32-bit products of two parameters."""
    products = []

    def visit(node):
        if isinstance(node, tirx.Mul) and str(node.ty.dtype) == "int32":
            if isinstance(node.a, ir.Var) and isinstance(node.b, ir.Var):
                products.append(str(node))

    walk(func, visit)
    return products


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


# -- shapes of arguments are facts of the program ------------------------------------------------


def _row_dots(name, over, x, y, body="X[{x}, k] * Y[{y}, k]", axes=""):
    """Sums of features for each stored element, whose result lies over some axes."""
    visited = [axis for axis in over.split() if axis != "K"]
    coordinates = ", ".join(axis.lower() for axis in visited)
    term = body.format(x=x, y=y)
    return small(name, f"""
with T.sp_iter([{", ".join(visited)}, K], "{"S" * len(visited)}R", "{name}") as [{coordinates}, k]:
    with T.init():
        S[{coordinates}] = 0.0
    S[{coordinates}] = S[{coordinates}] + {term}
""", axes, X=XY[x], Y=XY[y], S=over)  # fmt: skip


XY = {
    "h, i": "H I K", "h, j": "H N K", "i": "I K", "j": "N K", "i, h": "I H K", "j, h": "N H K",
    "h, io, ii": "H IO II K", "h, jo, ji": "H NO JI K",
}  # fmt: skip
HEADS = "H = T.dense_fixed(h)\nI\nJ\nN\nK"
BLOCKS = """
H = T.dense_fixed(h)
IO = T.dense_fixed(m)
JO = T.sparse_variable(IO, (n, nnz), (indptr, indices))
NO = T.dense_fixed(n)
II = T.dense_fixed(4)
JI = T.dense_fixed(8)
K
"""
ELL = "I\nJ = T.sparse_fixed(I, (n, cols), indices)\nN\nK"
DISTANCE = "(X[{x}, k] - Y[{y}, k]) * (X[{x}, k] - Y[{y}, k])"
# A program; of an argument, by the names of sizes, its shapes, the natural one first; wrong ones.
SHAPED = {
    "heads outside": (
        _row_dots("outside", "H I J", "h, i", "h, j", axes=HEADS), "s", ["h nnz", "h*nnz"],
        "nnz h",
    ),
    "heads inside": (
        _row_dots("inside", "I J H", "i, h", "j, h", axes=HEADS), "s", ["nnz h", "nnz*h"], "h nnz",
    ),
    "CSR": (_row_dots("sddmm", "I J", "i", "j", axes="I\nJ\nN\nK"), "s", ["nnz"], "1 nnz"),
    "blocks with heads": (
        _row_dots("blocks", "H IO JO II JI", "h, io, ii", "h, jo, ji", axes=BLOCKS),
        "s", ["h nnz 4 8", "h*nnz*4*8", "h*nnz 4 8"], "nnz h 4 8",
    ),
    "kNN": (
        _row_dots("knn", "I J", "i", "j", DISTANCE, ELL), "s", ["m*cols", "m cols"], "cols m",
    ),
    "kNN's columns": (
        _row_dots("knn", "I J", "i", "j", DISTANCE, ELL), "indices",
        ["m*cols", "m cols"], "cols m",
    ),
    "ELL": (PROGRAMS["row_max_ell"], "a", ["m*cols", "m cols"], "cols m"),
    "part of hyb": (PROGRAMS["spmm_ell"], "a", ["rows*cols", "rows cols"], "cols rows"),
    "BSR": (PROGRAMS["spmm_bsr"], "a", ["nnzb block block", "nnzb*block**2"], "nnzb block**2"),
    "DIA": (PROGRAMS["spmm_dia"], "a", ["diagonals n"], "diagonals*n"),
    "CSF": (PROGRAMS["ttm"], "y", ["nnz_j feat", "nnz_j*feat"], "feat nnz_j"),
}  # fmt: skip


def _parallel(func):
    sch = sparsetir.Schedule(func)
    for it in sparse_iterations(func):
        with contextlib.suppress(sparsetir.ScheduleError):  # of visits that race
            sch.parallelize(sch.get_sp_iters(sch.get_sparse_iteration(it.name))[0], "cpu")
    return sch


def _by_elements(func, rows=True):
    """Rows and stored columns are nested loops, and positions count the columns.

    rows : whether of all rows, or of each one's slots
    """
    sch = sparsetir.Schedule(func)
    ref = sch.get_sparse_iteration(next(iter(sparse_iterations(func))).name)
    loops = {x.name: x for x in sch.get_sp_iters(ref)}
    for column in (a for a in func.axes if a.name in loops and a.is_sparse and a.name[0] == "J"):
        with contextlib.suppress(sparsetir.ScheduleError):  # of a program of other loops
            path = [loops[axis.name] for axis in column.ancestors()]
            sch.positions(sch.sparse_fuse(ref, path) if rows else path[-1])
    return sch


def _in_stage_two(func):
    sch = s_tir.Schedule(sparsetir.lower_sparse_iter(func))
    block = sch.get_child_blocks(sch.get_sblock("root"))[0]
    sch.split(sch.get_loops(block)[-1], [None, 2])
    return sch


SCHEDULES = {
    "default": lambda func: func, "by hand": _parallel, "positions": _by_elements,
    "slots": functools.partial(_by_elements, rows=False), "TVM": _in_stage_two,
    "none": sparsetir.lower_sparse_iter,
}  # fmt: skip


def _run_program(program):
    """A program, its arguments, and those after it has run."""
    if not isinstance(program, sparsetir.SparseFunc):
        args = program.inputs(np.random.default_rng(0), "small", "float32", "int32")
        func, done = program.make("float32", "int32"), copied(args)
        return func, args, {**done, **program.oracle(copied(args))}
    rng = np.random.default_rng(0)
    m, n, h, feat, cols = 7, 11, 3, 5, 4
    mask = rng.random((m, n)) < 0.3
    names = [p.name for p in program.params]
    slots = np.sort(rng.random((m, n)).argsort(1)[:, :cols], 1)
    args = {"m": m, "n": n, "h": h, "feat": feat, "cols": cols, "nnz": int(mask.sum())}
    args |= {"indptr": np.append(0, mask.sum(1).cumsum()).astype("int32")}
    args |= {"indices": (slots.ravel() if "cols" in names else mask.nonzero()[1]).astype("int32")}
    shapes = sparsetir.build(program).signature
    for i in shapes.arrays:
        name = shapes.names[i]
        if name not in args:
            shape = shapes.expected_shape(i, [args.get(x) for x in shapes.names])
            args[name] = rng.random(shape).astype("float32")
    args = {name: args[name] for name in names}
    done = copied(args)
    sparsetir.interpret(program, done)
    return program, args, done


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", SHAPED)
@pytest.mark.slow
def test_natural_and_flat_arrays_are_taken_under_any_schedule(case, schedule):
    program, name, shapes, wrong = SHAPED[case]
    func, args, done = _run_program(program)
    kernel = sparsetir.build(SCHEDULES[schedule](func))
    arrays = {k: v for k, v in args.items() if isinstance(v, np.ndarray)}
    sizes = {k: v for k, v in args.items() if k not in arrays}
    implied = {kernel.signature.names[step.scalar] for step in kernel.signature.inferences}

    def of(shape):
        return tuple(eval(size, {**args}) for size in shape.split())

    for shape in [*shapes, *shapes]:  # the first of them for the first time
        passed = copied(arrays)
        mine = passed[name] = passed[name].reshape(of(shape))
        kernel(**passed, **{k: v for k, v in sizes.items() if k not in implied})
        assert passed[name] is mine
        for output in (k for k in arrays if not np.array_equal(done[k], args[k], equal_nan=True)):
            np.testing.assert_allclose(
                passed[output].reshape(-1), done[output].reshape(-1), **tolerance("float32")
            )
    for shape, words in (wrong, "shape"), (shapes[0], "a contiguous array"):
        array = np.repeat(arrays[name].reshape(-1), 2)[::2]
        array = (
            array.reshape(of(shape))
            if words == "shape"
            else np.lib.stride_tricks.as_strided(
                array, of(shape), [2 * array.itemsize] * len(of(shape))
            )
        )
        with pytest.raises(ValueError, match=f"'{name}': expected {words}"):
            kernel(**{**arrays, name: array}, **sizes)


@pytest.mark.parametrize("of", [torch.from_numpy, tvm.runtime.tensor])
@pytest.mark.default("tensor")
def test_flat_tensors_are_written_in_place(of):
    program, *_ = SHAPED["heads outside"]
    func, args, done = _run_program(program)
    kernel = sparsetir.build(_parallel(func))
    flat = of(np.full(done["s"].size, np.nan, "float32"))
    for calls in 1, 2:
        kernel(**{**args, "s": flat})
        np.testing.assert_allclose(flat.numpy(), done["s"].reshape(-1), **tolerance("float32"))
        assert getattr(flat, "_version", calls) == calls
