"""Stage II takes TVM's own schedule primitives: loops, caches and reductions on the CPU.

Each schedule is applied to a lowered program, lowered to stage III, run, and compared: see
`stage2.py`.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportMissingModuleSource=false

import numpy as np
import pytest

from programs import PROGRAMS
from small import small
from stage2 import check, loops, run_cpu, schedule, stage_two_steps, stage_two_table

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


# -- more than one iteration --------------------------------------------------------------------


# C[i] = 1 / d[i] * sum over j of A[i, j] B[j] + 1, in three iterations.
row_scaled = small("row_scaled", """
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
""", "K = T.dense_fixed(6)", A="I J", B="N K", D="I", C="I K")  # fmt: skip


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
