"""Tensor intrinsics on stage II: run on the CPU, and compiled to tensor core instructions."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportMissingModuleSource=false

import numpy as np
import pytest
from tvm import s_tir
from tvm.s_tir import TensorIntrin
from tvm.script import tirx as TIR

from programs import PROGRAMS
from sparsetir import LoweringError, lower_sparse_buffer, lower_sparse_iter
from sparsetir.sparse_ir import script as T
from sparsetir.sparse_ir.nodes import buffer_var
from sparsetir.sparse_ir.traversal import map_expr
from stage2 import run_cpu, schedule


def make_bsr(dtype):
    """Blocks of 16 x 16 times 32 features; both known at compile time."""

    @T.prim_func
    def bsr(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        mb: T.int32, nb: T.int32, nnzb: T.int32,
    ) -> None:  # fmt: skip
        IO = T.dense_fixed(mb)
        JO = T.sparse_variable(IO, (nb, nnzb), (indptr, indices))
        II = T.dense_fixed(16)
        JI = T.dense_fixed(16)
        JO_ = T.dense_fixed(nb)
        K = T.dense_fixed(32)
        A = T.match_sparse_buffer(a, (IO, JO, II, JI), dtype)
        B = T.match_sparse_buffer(b, (JO_, JI, K), dtype)
        C = T.match_sparse_buffer(c, (IO, II, K), "float32")
        with T.sp_iter([IO, JO, II, K, JI], "SRSSR", "bsr") as [io, jo, ii, k, ji]:
            with T.init():
                C[io, ii, k] = T.float32(0)
            C[io, ii, k] = C[io, ii, k] + T.cast(A[io, jo, ii, ji], "float32") * T.cast(
                B[jo, ji, k], "float32"
            )

    return bsr


def bsr_args(dtype):
    rng = np.random.default_rng(0)
    mask = rng.random((6, 5)) < 0.5
    mask[[0, 3, 5]] = False
    indices = np.nonzero(mask)[1].astype("int32")
    return {
        "a": rng.random((len(indices), 16, 16)).astype(dtype),
        "b": rng.random((5, 16, 32)).astype(dtype),
        "c": np.full((6, 16, 32), np.nan, "float32"),
        "indptr": np.concatenate([[0], np.cumsum(mask.sum(axis=1))]).astype("int32"),
        "indices": indices,
        "mb": 6,
        "nb": 5,
        "nnzb": len(indices),
    }


def bsr_oracle(args):
    out = np.zeros(args["c"].shape)
    rows = np.repeat(np.arange(args["mb"]), np.diff(args["indptr"]))
    np.add.at(out, rows, args["a"].astype("float64") @ args["b"][args["indices"]])
    return out


@TIR.prim_func(s_tir=True)
def matmul_desc(a: TIR.handle, b: TIR.handle, c: TIR.handle) -> None:
    A = TIR.match_buffer(a, (16, 16), "float32", offset_factor=1)
    B = TIR.match_buffer(b, (16, 16), "float32", offset_factor=1)
    C = TIR.match_buffer(c, (16, 16), "float32", offset_factor=1)
    with TIR.sblock("root"):
        TIR.reads(C[0:16, 0:16], A[0:16, 0:16], B[0:16, 0:16])
        TIR.writes(C[0:16, 0:16])
        for i, j, k in TIR.grid(16, 16, 16):
            with TIR.sblock("update"):
                vi, vj, vk = TIR.axis.remap("SSR", [i, j, k])
                C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]


@TIR.prim_func(s_tir=True)
def matmul_loops(a: TIR.handle, b: TIR.handle, c: TIR.handle) -> None:
    sa, sb, sc = TIR.int32(), TIR.int32(), TIR.int32()
    ta, tb, tc = TIR.int32(), TIR.int32(), TIR.int32()
    A = TIR.match_buffer(a, (16, 16), "float32", strides=[sa, ta], offset_factor=1)
    B = TIR.match_buffer(b, (16, 16), "float32", strides=[sb, tb], offset_factor=1)
    C = TIR.match_buffer(c, (16, 16), "float32", strides=[sc, tc], offset_factor=1)
    with TIR.sblock("root"):
        TIR.reads(C[0:16, 0:16], A[0:16, 0:16], B[0:16, 0:16])
        TIR.writes(C[0:16, 0:16])
        for k, i in TIR.grid(16, 16):
            for j in TIR.vectorized(16):
                with TIR.sblock("fma"):
                    TIR.reads(C[i, j], A[i, k], B[k, j])
                    TIR.writes(C[i, j])
                    C[i, j] = C[i, j] + A[i, k] * B[k, j]


@pytest.fixture(scope="module", autouse=True)
def intrinsics():
    TensorIntrin.register("sparsetir.test.loops", matmul_desc, matmul_loops, override=True)


def blocks_of_features(sch):
    """Loops over 16 features around the reduction; the outer and the inner block."""
    block = sch.get_sblock("bsr1")
    jo, ii, k, ji = sch.get_loops(block)
    k0, k1 = sch.split(k, [None, 16])
    sch.reorder(k0, jo, ii, k1, ji)
    return sch.blockize(ii), k0, jo


def hide_index_arrays(sch, block):
    """An intrinsic's description reads nothing but operands."""
    names = [r.source.name for r in sch.get(block).reads]
    hidden = [n for n, name in enumerate(names) if name.startswith("JO_")]
    sch.unsafe_hide_buffer_access(block, "read", hidden)


@pytest.mark.parametrize("decompose", [True, False])
def test_tensorize_on_cpu(decompose):
    def steps(sch):
        outer, _, jo = blocks_of_features(sch)
        if decompose:
            sch.decompose_reduction(outer, jo)
        inner = sch.get_sblock("bsr1")
        hide_index_arrays(sch, inner)
        sch.tensorize(sch.get_loops(inner)[-3], "sparsetir.test.loops")

    args = bsr_args("float32")
    out = run_cpu(schedule(make_bsr("float32"), steps), args)
    np.testing.assert_allclose(out["c"], bsr_oracle(args), rtol=1e-5)


def test_match_across_rows_is_refused():
    """A matched region must lie in the regular dimensions of a buffer."""
    lowered = lower_sparse_iter(PROGRAMS["elementwise"].make("float32", "int32"))

    def match(block):
        regions = [r for r in block.reads if r.source.name == "A"]
        if not any(iv.var.name == "vj" for iv in block.iter_vars):
            return block
        matched = s_tir.MatchBufferRegion(buffer_var([1, 1], "float32", "A_matched"), regions[0])
        fields = (block.body, block.init, block.alloc_buffers, [matched])
        return s_tir.SBlock(block.iter_vars, block.reads, block.writes, block.name_hint, *fields)

    func = lowered.with_body(map_expr(lowered.body, [(s_tir.SBlock, match)]))
    with pytest.raises(LoweringError, match="'A' is matched across a ragged dimension"):
        lower_sparse_buffer(func)
