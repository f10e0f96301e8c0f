"""Stage II takes TVM's schedule primitives, threads and tensor intrinsics."""

import numpy as np
import pytest
import scipy.sparse as sp
from tvm import s_tir
from tvm.s_tir import TensorIntrin
from tvm.script import tirx as TIR

from cuda_runner import requires_cuda_text
from gpu_runner import requires_opencl
from pairs import by_turns
from programs import PROGRAMS
from small import small
from sparsetir import LoweringError, lower_sparse_buffer, lower_sparse_iter
from sparsetir.sparse_ir.nodes import buffer_var
from sparsetir.sparse_ir.traversal import map_expr
from stage2 import (
    check,
    run_cpu,
    run_gpu,
    run_gpu_as_cuda,
    schedule,
    stage_two_steps,
    stage_two_table,
)

# A schedule to a line: of the block of the innermost iteration, b, and its loops, in `s`; `rows` is
# the loop over rows around it, and `block(name)` another block.
CPU = """
[spmm: j k]
s.split(j, [None, 2, 3])
s.split(j, [4, None])
s.split(rows, [None, 4])
s.fuse(j, k)
outer, inner = s.split(s.fuse(j, k), [None, 5]); s.reorder(inner, outer)
j0, j1 = s.split(j, [None, 3]); k0, k1 = s.split(k, [None, 4]); s.reorder(k0, j0, k1, j1)
s.parallel(s.split(rows, [None, 4])[0])
s.vectorize(s.split(k, [None, 4])[1])
outer, inner = s.split(k, [None, 4]); s.reorder(outer, j, inner); s.vectorize(inner)
s.unroll(s.split(j, [None, 4])[1])
s.add_unit_loop(b)
outer, inner = s.split(k, [None, 4]); s.reorder(outer, j, inner)\
; s.reverse_compute_at(s.cache_write(b, 0, "local"), outer); s.decompose_reduction(b, j)
s.cache_write(b, 0, "local")
s.cache_write(block("spmm0"), 0, "global")
s.reverse_compute_at(s.cache_write(block("spmm0"), 0, "local"), rows)
s.cache_read(b, "A", "local")
s.compute_at(s.cache_read(b, "A", "local"), s.split(j, [None, 4])[0])
s.compute_at(s.cache_read(b, "A", "local"), j)
s.cache_read(b, "J_indices", "global")
s.compute_at(s.cache_read(b, "J_indices", "local"), s.split(j, [None, 4])[0])
s.compute_at(s.cache_read(b, "J_indices", "local"), j)
s.compute_at(s.cache_read(block("spmm0"), "J_indptr", "local"), rows)
s.cache_read(block("spmm0"), "A", "global")
s.cache_read(b, "B", "global")
s.compute_at(s.cache_read(b, "B", "local"), j)
outer, inner = s.split(k, [None, 4]); s.reorder(outer, j, inner)\
; s.compute_at(s.cache_read(b, "B", "local"), j)
s.reindex_cache_read(b, 1, "local", lambda j, k: (j,))
s.decompose_reduction(b, j)
s.reorder(k, j); s.decompose_reduction(b, j)
s.reorder(k, j); s.decompose_reduction(b, k)
outer, inner = s.split(j, [None, 4]); s.reorder(outer, k, inner); s.decompose_reduction(b, outer)
s.vectorize(s.split(k, [None, 4])[1]); s.decompose_reduction(b, j)
s.rfactor(s.split(j, [None, 4])[1], 0)
s.rfactor(s.split(j, [4, None])[0], 0)
made = s.rfactor(s.split(j, [None, 4])[1], 2); s.decompose_reduction(made, s.get_loops(made)[0])
s.blockize(k)
s.decompose_reduction(s.blockize(k), j)
[spmm_bsr: jo ii ji k]
k0, k1 = s.split(k, [None, 4]); s.reorder(ii, k0, jo, ji, k1); s.vectorize(k1)
s.fuse(jo, ii, ji, k)
s.reorder(jo, k, ii, ji); s.blockize(ii)
[spmm_ell: o i j k]
k0, k1 = s.split(k, [None, 4]); s.reorder(k0, o, i, j, k1)
s.compute_at(s.cache_read(b, "B", "local"), j)
s.compute_at(s.cache_read(b, "A", "local"), i)\
; s.compute_at(s.cache_read(b, "J_indices", "local"), i)
[sddmm: j k]
s.reverse_compute_at(s.cache_write(b, 0, "local"), j)
s.cache_write(b, 0, "global")
s.cache_write(block("sddmm0"), 0, "global")
s.rfactor(k, 0)
s.rfactor(s.split(k, [None, 4])[1], 0)
s.decompose_reduction(b, k)
s.decompose_reduction(b, j)
[row_softmax: i]
[s.set_scope(block(x), 0, "local") for x in ("top0", "total0")]; s.parallel(i)
s.cache_write(block("top0"), 0, "local"); s.decompose_reduction(block("top0"), loops("top0")[0])
s.cache_read(block("top0"), "A", "local", [block("top0"), block("total0")])
[spmm_search: j]
s.parallel(loops("spmm0")[0]); s.split(loops("spmm0")[1], [None, 4])\
; s.unroll(s.split(j, [None, 4])[1])
[normalized_rows: ]
i = loops("divide0")[0]; s.compute_at(block("degree0"), i)\
; s.set_scope(block("degree1"), 0, "local"); s.parallel(i)
[mttkrp: ]
[s.split(x, [None, 3]) for n in range(3) for x in loops(f"mttkrp{n}")]
"""


@pytest.mark.parametrize(("program", "names", "code"), stage_two_table(CPU))
def test_cpu(program, names, code):
    steps = stage_two_steps(program, names, code)
    check(program, schedule(PROGRAMS[program].make("float32", "int32"), steps), run_cpu)


ROW = 's.bind(rows, "blockIdx.x"); s.reorder(k, j); _, x = s.split(k, [None, 4])'
BLOCKS = 's.bind(rows, "blockIdx.x"); s.reorder(k, j); s.bind(k, "blockIdx.y")'
LOCAL = f'{ROW}; s.reverse_compute_at(s.cache_write(b, 0, "local"), x); s.bind(x, "threadIdx.x")'
REDUCED = f'{BLOCKS}; s.bind(s.split(j, [None, 8])[1], "threadIdx.x")'
# TVM's compute_at of what rfactor makes drops the bound of a partial
# tile, which the lowering puts back; and the last block of nonzeros is partial: a bound that
# differs between threads of a block must not lie around a reduction over threads.
GPU = f"""
[spmm: j k]
{ROW}; s.bind(x, "threadIdx.x")
outer, inner = s.split(rows, [None, 4]); s.bind(outer, "blockIdx.x"); s.bind(inner, "threadIdx.y")\
; s.reorder(k, j); x, y = s.split(k, [None, 4]); s.bind(x, "blockIdx.y"); s.bind(y, "threadIdx.x")
s.bind(rows, "blockIdx.x"); s.bind(s.split(k, [None, 4])[1], "threadIdx.x")
{ROW}; s.bind(x, "threadIdx.x"); s.decompose_reduction(b, j)
{LOCAL}
{LOCAL}; s.decompose_reduction(b, j)
{LOCAL}; s.compute_at(s.cache_read(b, "B", "local"), j)
{ROW}; s.bind(x, "threadIdx.x"); s.compute_at(s.cache_read(b, "J_indices", "local"), j)
{REDUCED}
{ROW}; s.bind(x, "threadIdx.y"); s.bind(s.split(j, [None, 8])[1], "threadIdx.x")
{BLOCKS}; _, x = s.split(j, [None, 8]); s.reverse_compute_at(s.cache_write(b, 0, "local"), k)\
; s.bind(x, "threadIdx.x")
s.bind(rows, "blockIdx.x"); s.reorder(k, j); f = s.rfactor(s.split(j, [None, 8])[1], 0)\
; k, x = s.get_loops(b); s.bind(x, "threadIdx.x"); s.compute_at(f, k)\
; s.bind(s.get_loops(f)[-2], "threadIdx.x"); s.set_scope(f, 0, "local")
[sddmm: j k]
s.bind(rows, "blockIdx.x"); s.bind(s.split(k, [None, 4])[1], "threadIdx.x")
[sddmm_fused: k]
s.bind(s.split(rows, [None, 8])[0], "blockIdx.x"); s.bind(s.split(k, [None, 4])[1], "threadIdx.x")
x, y = s.split(rows, [None, 8]); s.bind(x, "blockIdx.x"); s.bind(y, "threadIdx.x")
[row_softmax: i]
x, y = s.split(i, [None, 8]); s.bind(x, "blockIdx.x"); s.bind(y, "threadIdx.x")\
; [s.set_scope(block(x), 0, "local") for x in ("top0", "total0")]
x, y = s.split(i, [None, 8]); s.bind(x, "blockIdx.x"); s.bind(y, "threadIdx.x")
"""
TABLE = stage_two_table(GPU)


@requires_opencl
@pytest.mark.parametrize(("program", "names", "code"), by_turns(TABLE, 4))
def test_gpu(program, names, code):
    steps = stage_two_steps(program, names, code)
    check(program, schedule(PROGRAMS[program].make("float32", "int32"), steps), run_gpu)


@pytest.mark.slow
@requires_cuda_text
@pytest.mark.parametrize(("program", "names", "code"), TABLE)
def test_gpu_as_cuda(program, names, code):
    steps = stage_two_steps(program, names, code)
    check(program, schedule(PROGRAMS[program].make("float32", "int32"), steps), run_gpu_as_cuda)


def test_decomposed_reduction_over_threads_is_refused():
    """TVM would let the threads race for the output."""
    code = f"{REDUCED}; s.decompose_reduction(b, s.get_loops(b)[1])"
    steps = stage_two_steps("spmm", ["j", "k"], code)
    sch = schedule(PROGRAMS["spmm"].make("float32", "int32"), steps)
    with pytest.raises(
        LoweringError, match="'spmm1_update': its reduction is bound to threadIdx.x"
    ):
        lower_sparse_buffer(sch)


# Blocks of 16 x 16 times 32 features.
bsr = small("bsr", """
with T.sp_iter([IO, JO, II, K, JI], "SRSSR", "bsr") as [io, jo, ii, k, ji]:
    with T.init():
        C[io, ii, k] = T.float32(0)
    C[io, ii, k] = C[io, ii, k] + A[io, jo, ii, ji] * B[jo, ji, k]
""", """
IO = T.dense_fixed(m)
JO = T.sparse_variable(IO, (n, nnz), (indptr, indices))
II = T.dense_fixed(16)
JI = T.dense_fixed(16)
JO_ = T.dense_fixed(n)
K = T.dense_fixed(32)
""", A="IO JO II JI", B="JO_ JI K", C="IO II K")  # fmt: skip


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

    rng = np.random.default_rng(0)
    indptr, indices = (
        np.array([0, 0, 3, 4, 4, 6, 6], "int32"),
        np.array([0, 2, 4, 1, 0, 3], "int32"),
    )
    a, b = rng.random((6, 16, 16), "float32"), rng.random((5, 16, 32), "float32")
    args = {"a": a, "b": b, "c": np.full((6, 16, 32), np.nan, "float32"), "indptr": indptr}
    out = run_cpu(schedule(bsr, steps), {**args, "indices": indices, "m": 6, "n": 5, "nnz": 6})
    want = sp.bsr_array((a, indices, indptr), shape=(96, 80)) @ b.reshape(80, 32)
    np.testing.assert_allclose(out["c"].reshape(96, 32), want, rtol=1e-5)


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
