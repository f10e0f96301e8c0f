"""The text of stages II and III, and that legal schedules of stage II compute the same."""

import numpy as np
import pytest
import scipy.sparse
import tvm
from hypothesis import strategies as st
from tvm import s_tir, tirx

from drawing import examples
from programs import PROGRAMS
from small import small
from sparsetir import LoweringError, Schedule, build, lower_sparse_buffer, lower_sparse_iter
from sparsetir.sparse_ir.nodes import nodes_of, walk
from stage2 import golden, plain_text


def lower(program, idtype="int32"):
    return lower_sparse_iter(PROGRAMS[program].make("float32", idtype))


def blocks(func):
    """The function's blocks by name."""
    by_name = {}

    def visit(node):
        if isinstance(node, s_tir.SBlock):
            by_name[str(node.name_hint)] = node

    walk(func.body, visit)
    return by_name


def searches(func):
    return [name for name in blocks(func) if name.startswith("find_")]


@pytest.mark.parametrize("program", ["spmm", "sddmm_fused", "spmm_bsr", "row_softmax"])
def test_golden(program):
    func = lower(program)
    assert plain_text(func) == golden(f"{program}_stage2")
    assert plain_text(lower_sparse_buffer(func)) == golden(f"{program}_stage3")


# -- searches -----------------------------------------------------------------------------------


def make_two_operands(shared):
    """C[i, k] = sum over all j of A[i, j] * D[i, j] * B[j, k]; A and D may share their axes."""
    return small("two", """
with T.sp_iter([I, N, K], "SRS", "two") as [i, j, k]:
    with T.init():
        C[i, k] = 0.0
    C[i, k] = C[i, k] + A[i, j] * D[i, j] * B[j, k]
""", """
J = T.sparse_variable(I, (n, nnz), (p, q))
L = T.sparse_variable(I, (n, nnz2), (r, s))
""", A="I J", D="I J" if shared else "I L", B="N K", C="I K")  # fmt: skip


@pytest.mark.parametrize("shared, names", [(True, ["J_pos"]), (False, ["J_pos", "L_pos"])])
def test_equal_searches_are_shared_and_hoisted(shared, names):
    func = lower_sparse_iter(make_two_operands(shared))
    assert searches(func) == [f"find_{name}" for name in names]
    outer = blocks(func)["two0"]
    assert [str(iv.var) for iv in outer.iter_vars] == ["vi", "vj"]
    *finds, features = outer.body.seq
    assert [f.block.name_hint for f in finds] == [f"find_{name}" for name in names]
    assert isinstance(features, tirx.For) and str(features.loop_var) == "k"


# -- regions, domains, types ----------------------------------------------------------------------


@pytest.mark.parametrize(("feat", "dtype"), [("feat", "int64"), ("4", "int64"), ("1", "int32")])
def test_loops_over_products_of_sizes(feat, dtype):
    """Numbers of nonzeros x features may pass 2^31 where neither does."""
    axes = f"K = T.dense_fixed({feat})"
    func = small("each", """
with T.sp_iter([I, K], "SS", "dense") as [i, k]:
    Y[i, k] = 2.0
with T.sp_iter([I, J, K], "SSS", "each") as [i, j, k]:
    X[i, j, k] = X[i, j, k] * 2.0
""", axes, X="I J K", Y="I K")  # fmt: skip
    sch = Schedule(func)
    sch.parallelize(sch.get_sp_iters(sch.get_sparse_iteration("dense")))
    each = sch.get_sparse_iteration("each")
    sch.sparse_fuse(each, sch.get_sp_iters(each))
    types = [str(x.loop_var.ty.dtype) for x in nodes_of(tirx.For, lower_sparse_iter(sch.func).body)]
    assert types == [dtype, dtype]


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lowering", [lower_sparse_iter, lower_sparse_buffer])
def test_not_a_function(lowering):
    with pytest.raises(TypeError, match=f"{lowering.__name__}: argument 'func_or_mod': expected"):
        lowering("spmm")


def test_a_cache_with_the_name_of_a_sparse_buffer():
    f = small("f", """
with T.sp_iter([I, J], "SS", "copy") as [i, j]:
    A_global[i, j] = A[i, j]
""", A="I J", A_global="I J")  # fmt: skip
    sch = s_tir.Schedule(s_tir.renew_defs(lower_sparse_iter(f)))
    sch.cache_read(sch.get_sblock("copy1"), "A", "global")
    with pytest.raises(LoweringError, match="two buffers are called 'A_global'"):
        lower_sparse_buffer(sch)


def test_modules_keep_what_is_not_ours():
    plain = lower_sparse_buffer(lower("spmv"))
    mod = tvm.IRModule({"plain": plain, "spmm": PROGRAMS["spmm"].make("float32", "int32")})
    stage2 = lower_sparse_iter(mod)
    assert stage2["plain"].same_as(plain)
    stage3 = lower_sparse_buffer(stage2)
    assert stage3["plain"].same_as(plain)
    assert plain_text(stage3["spmm"]) == golden("spmm_stage3")


# -- any schedule ---------------------------------------------------------------------------------


@st.composite
def matrices(draw):
    """A CSR matrix, possibly empty, with empty rows, unsorted within none of them."""
    m, n = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    density = draw(st.sampled_from([0, 0.1, 0.4, 1]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    matrix = scipy.sparse.random(m, n, density, "csr", "float32", rng)
    matrix.sort_indices()
    return matrix


FACTORS = st.integers(1, 5)


@examples(8, 200, matrix=matrices(), feat=st.integers(1, 9), data=st.data())
def test_random_schedules(matrix, feat, data):
    draw = data.draw
    sch = s_tir.Schedule(s_tir.renew_defs(lower("spmm")))
    block = sch.get_sblock("spmm1")
    (rows,) = sch.get_loops(sch.get_sblock("spmm0"))
    j, k = sch.get_loops(block)
    spatial, reduced = [k], [j]
    if draw(st.booleans()):
        rows, _ = sch.split(rows, [None, draw(FACTORS)])
    if draw(st.booleans()):
        spatial = list(sch.split(k, [None, draw(FACTORS)]))
    if draw(st.booleans()):
        reduced = list(sch.split(j, [None, draw(FACTORS)]))
    order = draw(st.permutations([*spatial, *reduced]))
    sch.reorder(*order)
    # The spatial loops outside of every reduction loop may hold a cache, down to a part of a split
    # loop that the other part is not around: there TVM caches more than is computed.
    outside = order[: next(n for n, loop in enumerate(order) if loop in reduced)]
    outside = outside[: outside.index(spatial[0]) + 2] if spatial[0] in outside[:1] else []
    if draw(st.booleans()):
        copy = sch.cache_write(block, 0, draw(st.sampled_from(["local", "global"])))
        if outside:
            sch.reverse_compute_at(copy, draw(st.sampled_from(outside)))
    if len(spatial) == 2 and order[-1] is spatial[1]:
        draw(st.sampled_from([sch.vectorize, sch.unroll]))(order[-1])
    if draw(st.booleans()):
        sch.parallel(rows)
    if draw(st.booleans()):
        above = order[: min(order.index(loop) for loop in reduced) + 1]
        sch.decompose_reduction(block, draw(st.sampled_from(above)))
    b = np.random.default_rng(0).random((matrix.shape[1], feat), "float32")
    c = np.full((matrix.shape[0], feat), np.nan, "float32")
    index = (matrix.indptr.astype("int32"), matrix.indices.astype("int32"))
    build(sch)(matrix.data, b, c, *index, *matrix.shape, matrix.nnz, feat)
    np.testing.assert_allclose(c, matrix @ b, rtol=1e-5, atol=1e-6)
