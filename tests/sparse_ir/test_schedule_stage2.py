"""Stage II takes TVM's own schedule primitives: loops, caches and reductions on the CPU.

Each schedule is applied to a lowered program, lowered to stage III, run, and compared: see
`stage2.py`.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportMissingModuleSource=false

import numpy as np
import pytest
import tvm
from tvm import s_tir

from programs import PROGRAMS
from sparsetir import lower_sparse_iter
from sparsetir.sparse_ir import script as T
from stage2 import check, loops, on, run_cpu, schedule

CPU = []


# -- loops ------------------------------------------------------------------------------------


@on(CPU, "spmm")
def split_the_dynamic_loop(s, b, j, k):
    s.split(j, [None, 3])


@on(CPU, "spmm")
def split_the_dynamic_loop_in_three(s, b, j, k):
    s.split(j, [None, 2, 3])


@on(CPU, "spmm")
def split_by_parts(s, b, j, k):
    s.split(j, [4, None])


@on(CPU, "spmm")
def split_features(s, b, j, k):
    s.split(k, [None, 4])


@on(CPU, "spmm")
def split_rows(s, b, j, k):
    (i,) = loops(s, "spmm0")
    s.split(i, [None, 4])


@on(CPU, "spmm")
def fuse(s, b, j, k):
    s.fuse(j, k)


@on(CPU, "spmm")
def fuse_and_split(s, b, j, k):
    s.split(s.fuse(j, k), [None, 5])


@on(CPU, "spmm")
def fuse_split_reorder(s, b, j, k):
    outer, inner = s.split(s.fuse(j, k), [None, 5])
    s.reorder(inner, outer)


@on(CPU, "spmm")
def reorder(s, b, j, k):
    s.reorder(k, j)


@on(CPU, "spmm")
def tile(s, b, j, k):
    j0, j1 = s.split(j, [None, 3])
    k0, k1 = s.split(k, [None, 4])
    s.reorder(k0, j0, k1, j1)


@on(CPU, "spmm")
def parallel(s, b, j, k):
    (i,) = loops(s, "spmm0")
    s.parallel(i)


@on(CPU, "spmm")
def parallel_chunks(s, b, j, k):
    (i,) = loops(s, "spmm0")
    outer, _ = s.split(i, [None, 4])
    s.parallel(outer)


@on(CPU, "spmm")
def vectorize(s, b, j, k):
    _, inner = s.split(k, [None, 4])
    s.vectorize(inner)


@on(CPU, "spmm")
def vectorize_inside_a_feature_tile(s, b, j, k):
    outer, inner = s.split(k, [None, 4])
    s.reorder(outer, j, inner)
    s.vectorize(inner)


@on(CPU, "spmm")
def unroll_the_dynamic_loop(s, b, j, k):
    _, inner = s.split(j, [None, 4])
    s.unroll(inner)


@on(CPU, "spmm")
def add_unit_loop(s, b, j, k):
    s.add_unit_loop(b)


@on(CPU, "spmm_bsr")
def tile_a_block(s, b, jo, ii, ji, k):
    k0, k1 = s.split(k, [None, 4])
    s.reorder(ii, k0, jo, ji, k1)
    s.vectorize(k1)


@on(CPU, "spmm_bsr")
def fuse_all(s, b, jo, ii, ji, k):
    s.fuse(jo, ii, ji, k)


@on(CPU, "spmm_ell")
def split_and_reorder(s, b, o, i, j, k):
    k0, k1 = s.split(k, [None, 4])
    s.reorder(k0, o, i, j, k1)


# -- caches -----------------------------------------------------------------------------------


@on(CPU, "spmm")
def cache_write_a_tile(s, b, j, k):
    outer, inner = s.split(k, [None, 4])
    s.reorder(outer, j, inner)
    s.reverse_compute_at(s.cache_write(b, 0, "local"), outer)


@on(CPU, "spmm")
def cache_write_a_tile_and_decompose(s, b, j, k):
    outer, inner = s.split(k, [None, 4])
    s.reorder(outer, j, inner)
    s.reverse_compute_at(s.cache_write(b, 0, "local"), outer)
    s.decompose_reduction(b, j)


@on(CPU, "spmm")
def cache_write_a_row(s, b, j, k):
    s.cache_write(b, 0, "local")


@on(CPU, "spmm")
def cache_write_all_rows(s, b, j, k):
    s.cache_write(s.get_sblock("spmm0"), 0, "global")


@on(CPU, "spmm")
def cache_write_at_the_row(s, b, j, k):
    (i,) = loops(s, "spmm0")
    s.reverse_compute_at(s.cache_write(s.get_sblock("spmm0"), 0, "local"), i)


@on(CPU, "spmm")
def cache_read_a_row_of_values(s, b, j, k):
    s.cache_read(b, "A", "local")


@on(CPU, "spmm")
def cache_read_a_tile_of_values(s, b, j, k):
    outer, _ = s.split(j, [None, 4])
    s.compute_at(s.cache_read(b, "A", "local"), outer)


@on(CPU, "spmm")
def cache_read_one_value(s, b, j, k):
    s.compute_at(s.cache_read(b, "A", "local"), j)


@on(CPU, "spmm")
def cache_read_indices_of_a_row(s, b, j, k):
    s.cache_read(b, "J_indices", "global")


@on(CPU, "spmm")
def cache_read_indices_of_a_tile(s, b, j, k):
    outer, _ = s.split(j, [None, 4])
    s.compute_at(s.cache_read(b, "J_indices", "local"), outer)


@on(CPU, "spmm")
def cache_read_one_index(s, b, j, k):
    s.compute_at(s.cache_read(b, "J_indices", "local"), j)


@on(CPU, "spmm")
def cache_read_offsets(s, b, j, k):
    block = s.get_sblock("spmm0")
    s.compute_at(s.cache_read(block, "J_indptr", "local"), *s.get_loops(block))


@on(CPU, "spmm")
def cache_read_all_values(s, b, j, k):
    s.cache_read(s.get_sblock("spmm0"), "A", "global")


@on(CPU, "spmm")
def cache_read_the_dense_operand(s, b, j, k):
    s.cache_read(b, "B", "global")


@on(CPU, "spmm")
def cache_read_a_gathered_row(s, b, j, k):
    s.compute_at(s.cache_read(b, "B", "local"), j)


@on(CPU, "spmm")
def cache_read_a_gathered_tile(s, b, j, k):
    outer, inner = s.split(k, [None, 4])
    s.reorder(outer, j, inner)
    s.compute_at(s.cache_read(b, "B", "local"), j)


@on(CPU, "spmm")
def reindex_cache_read_a_row_of_values(s, b, j, k):
    s.reindex_cache_read(b, 1, "local", lambda j, k: (j,))


@on(CPU, "spmm_ell")
def cache_read_gathered(s, b, o, i, j, k):
    s.compute_at(s.cache_read(b, "B", "local"), j)


@on(CPU, "spmm_ell")
def cache_read_values_and_indices(s, b, o, i, j, k):
    s.compute_at(s.cache_read(b, "A", "local"), i)
    s.compute_at(s.cache_read(b, "J_indices", "local"), i)


@on(CPU, "sddmm")
def cache_write_one_value(s, b, j, k):
    s.reverse_compute_at(s.cache_write(b, 0, "local"), j)


@on(CPU, "sddmm")
def cache_write_a_ragged_row(s, b, j, k):
    s.cache_write(b, 0, "global")


@on(CPU, "sddmm")
def cache_write_all(s, b, j, k):
    s.cache_write(s.get_sblock("sddmm0"), 0, "global")


@on(CPU, "row_softmax")
def temporaries_of_one_row(s, b, i):
    for block in ("top0", "total0"):
        s.set_scope(s.get_sblock(block), 0, "local")
    s.parallel(i)


@on(CPU, "row_softmax")
def cache_write_the_maximum(s, b, i):
    block = s.get_sblock("top0")
    s.cache_write(block, 0, "local")
    (j,) = s.get_loops(block)
    s.decompose_reduction(block, j)


@on(CPU, "row_softmax")
def cache_read_the_row_once(s, b, i):
    s.cache_read(s.get_sblock("top0"), "A", "local", [s.get_sblock("top0"), s.get_sblock("total0")])


# -- reductions -------------------------------------------------------------------------------


@on(CPU, "spmm")
def decompose_at_the_reduction(s, b, j, k):
    s.decompose_reduction(b, j)


@on(CPU, "spmm")
def decompose_inside_the_features(s, b, j, k):
    s.reorder(k, j)
    s.decompose_reduction(b, j)


@on(CPU, "spmm")
def decompose_above_the_features(s, b, j, k):
    s.reorder(k, j)
    s.decompose_reduction(b, k)


@on(CPU, "spmm")
def decompose_a_split_reduction(s, b, j, k):
    outer, inner = s.split(j, [None, 4])
    s.reorder(outer, k, inner)
    s.decompose_reduction(b, outer)


@on(CPU, "spmm")
def vectorize_decomposed(s, b, j, k):
    outer, inner = s.split(k, [None, 4])
    s.vectorize(inner)
    s.decompose_reduction(b, j)


@on(CPU, "spmm")
def rfactor_the_inner_part(s, b, j, k):
    _, inner = s.split(j, [None, 4])
    s.rfactor(inner, 0)


@on(CPU, "spmm")
def rfactor_the_outer_part(s, b, j, k):
    outer, _ = s.split(j, [4, None])
    s.rfactor(outer, 0)


@on(CPU, "spmm")
def rfactor_and_decompose(s, b, j, k):
    _, inner = s.split(j, [None, 4])
    factored = s.rfactor(inner, 2)
    s.decompose_reduction(factored, s.get_loops(factored)[0])


@on(CPU, "sddmm")
def rfactor_features(s, b, j, k):
    s.rfactor(k, 0)


@on(CPU, "sddmm")
def rfactor_a_part_of_the_features(s, b, j, k):
    _, inner = s.split(k, [None, 4])
    s.rfactor(inner, 0)


@on(CPU, "sddmm")
def decompose_at_the_features(s, b, j, k):
    s.decompose_reduction(b, k)


@on(CPU, "sddmm")
def decompose_at_the_row(s, b, j, k):
    s.decompose_reduction(b, j)


@on(CPU, "spmm")
def blockize(s, b, j, k):
    s.blockize(k)


@on(CPU, "spmm")
def blockize_and_decompose(s, b, j, k):
    s.decompose_reduction(s.blockize(k), j)


@on(CPU, "spmm_bsr")
def blockize_a_block(s, b, jo, ii, ji, k):
    s.reorder(jo, k, ii, ji)
    s.blockize(ii)


@pytest.mark.parametrize("program, steps", CPU)
def test_cpu(program, steps):
    check(program, schedule(PROGRAMS[program].make("float32", "int32"), steps), run_cpu)


def test_loops_around_and_inside_a_search():
    def steps(sch):
        i, j = loops(sch, "spmm0")
        (k,) = loops(sch, "spmm1")
        sch.parallel(i)
        sch.split(j, [None, 4])
        sch.unroll(sch.split(k, [None, 4])[1])

    make = PROGRAMS["spmm_search"].make
    check("spmm_search", schedule(make("float32", "int32"), steps), run_cpu)


def test_compute_at_the_row_of_another_iteration():
    def steps(sch):
        (i,) = loops(sch, "divide0")
        sch.compute_at(sch.get_sblock("degree0"), i)
        sch.set_scope(sch.get_sblock("degree1"), 0, "local")
        sch.parallel(i)

    make = PROGRAMS["normalized_rows"].make
    check("normalized_rows", schedule(make("float32", "int32"), steps), run_cpu)


def test_csf_levels():
    def steps(sch):
        for number in range(3):
            for loop in loops(sch, f"mttkrp{number}"):
                sch.split(loop, [None, 3])

    check("mttkrp", schedule(PROGRAMS["mttkrp"].make("float32", "int32"), steps), run_cpu)


# -- more than one iteration --------------------------------------------------------------------


@T.prim_func
def row_scaled(
    a: T.handle, b: T.handle, d: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
    m: T.int32, n: T.int32, nnz: T.int32,
) -> None:  # fmt: skip
    """C[i] = 1 / d[i] * sum over j of A[i, j] B[j] + 1, in three iterations."""
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    J_ = T.dense_fixed(n)
    K = T.dense_fixed(6)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (J_, K), "float32")
    D = T.match_sparse_buffer(d, (I,), "float32")
    C = T.match_sparse_buffer(c, (I, K), "float32")
    S = T.alloc_sparse_buffer((I,), "float32")
    P = T.alloc_sparse_buffer((I, K), "float32")
    with T.sp_iter([I], "S", "scale") as [i]:
        S[i] = T.float32(1) / D[i]
    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
        with T.init():
            P[i, k] = 0.0
        P[i, k] = P[i, k] + S[i] * A[i, j] * B[j, k]
    with T.sp_iter([I, K], "SS", "post") as [i, k]:
        C[i, k] = P[i, k] + T.float32(1)


def row_scaled_args():
    args = PROGRAMS["spmm"].inputs(np.random.default_rng(0), "small", "float32", "int32")
    del args["feat"]
    rng = np.random.default_rng(1)
    args["b"] = rng.random((args["n"], 6), "float32")
    args["c"] = np.full((args["m"], 6), np.nan, "float32")
    return {**args, "d": rng.random(args["m"], "float32") + 1}


def compute_at_the_row(sch):
    sch.compute_at(sch.get_sblock("scale0"), *loops(sch, "spmm0"))


def reverse_compute_at_the_row(sch):
    sch.reverse_compute_at(sch.get_sblock("post0"), *loops(sch, "spmm0"))


def all_in_one_row(sch):
    (i,) = loops(sch, "spmm0")
    sch.compute_at(sch.get_sblock("scale0"), i)
    sch.reverse_compute_at(sch.get_sblock("post0"), i)
    sch.set_scope(sch.get_sblock("scale0"), 0, "local")
    sch.set_scope(sch.get_sblock("spmm1"), 0, "local")
    sch.parallel(i)


def inline(sch):
    sch.compute_inline(sch.get_sblock("scale0"))


@pytest.mark.parametrize(
    "steps", [compute_at_the_row, reverse_compute_at_the_row, all_in_one_row, inline]
)
def test_several_iterations(steps):
    args = row_scaled_args()
    out = run_cpu(schedule(row_scaled, steps), args)
    expected = PROGRAMS["spmm"].oracle(args)["c"] / args["d"][:, None] + 1
    np.testing.assert_allclose(out["c"], expected, rtol=1e-5)


# -- what TVM refuses -----------------------------------------------------------------------------


def refused(steps, message):
    sch = s_tir.Schedule(
        s_tir.renew_defs(lower_sparse_iter(PROGRAMS["spmm"].make("float32", "int32")))
    )
    block = sch.get_sblock("spmm1")
    with pytest.raises(tvm.s_tir.ScheduleError, match=message):
        steps(sch, block, *sch.get_loops(block))


def test_blockize_takes_no_partial_tile():
    """Known TVM limit: split a static extent by a divisor before blockize and tensorize."""
    refused(lambda s, b, j, k: s.blockize(s.split(k, [None, 4])[1]), "can not be blockized")


def test_bind_after_decompose():
    """Known TVM limit: bind first, decompose last."""

    def steps(s, b, j, k):
        s.decompose_reduction(b, j)
        s.bind(s.get_loops(s.get_sblock("spmm1_update"))[-1], "threadIdx.x")

    refused(steps, "does not have compact dataflow")


def test_reduction_loop_is_not_parallel():
    refused(lambda s, b, j, k: s.parallel(j), "is not a data parallel block iter")


def test_vectorize_next_to_a_search():
    """Known TVM limit: there the init is a level further out, so the block is no reduction."""
    lowered = lower_sparse_iter(PROGRAMS["spmm_search"].make("float32", "int32"))
    sch = s_tir.Schedule(s_tir.renew_defs(lowered))
    with pytest.raises(tvm.s_tir.ScheduleError, match="does not have compact dataflow"):
        sch.vectorize(*loops(sch, "spmm1"))


def test_compute_at_next_to_a_ragged_temporary():
    """Known TVM limit: a region of dynamic size is never proven to cover what reads it."""
    lowered = lower_sparse_iter(PROGRAMS["attention"].make("float32", "int32"))
    sch = s_tir.Schedule(s_tir.renew_defs(lowered))
    with pytest.raises(tvm.s_tir.ScheduleError, match="stage pipeline"):
        sch.compute_at(sch.get_sblock("scores0"), *loops(sch, "softmax0"))
