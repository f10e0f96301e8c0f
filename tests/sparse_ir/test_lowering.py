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
from sparsetir import (
    LoweringError,
    Schedule,
    build,
    from_source,
    lower_sparse_buffer,
    lower_sparse_iter,
)
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


SEARCHES = dict.fromkeys(["spmv", "spmm", "sddmm", "spmm_bsr", "spmm_ell", "mttkrp", "ttm"], ())
SEARCHES |= {"csf_siblings": ("K0",), "spmm_search": ("J",), "sddmm_fused": ("I_at",)}


@pytest.mark.parametrize("program", SEARCHES)
def test_searches_where_positions_are_not_known(program):
    names = [name.removeprefix("find_").removesuffix("_pos") for name in searches(lower(program))]
    assert tuple(names) == SEARCHES[program]


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


@pytest.mark.parametrize("program", ["spmm", "spmm_search", "sddmm_fused", "csf_siblings"])
@pytest.mark.parametrize("idtype", ["int32", "int64"])
def test_index_types(program, idtype):
    """Loops, block iterators, index arrays and search results have the axes' type."""
    func = lower(program, idtype)
    types = set()

    def visit(node):
        if isinstance(node, tirx.For):
            types.add(str(node.loop_var.ty.dtype))
        if isinstance(node, s_tir.SBlock):
            types.update(str(iv.var.ty.dtype) for iv in node.iter_vars)
            types.update(str(v.ty.dtype) for v in node.alloc_buffers)

    walk(func.body, visit)
    types.update(str(p.ty.dtype) for p in func.params if "_ind" in p.name)
    assert types == {idtype}


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


def test_a_length_that_does_not_fit_the_type_of_a_coordinate():
    """Coordinates of 32 bits on an axis longer than 2^31: all but negative ones are in range."""
    func = from_source("""
@T.prim_func
def f(x: T.handle, idx: T.handle, out: T.handle, n: T.int64, m: T.int32) -> None:
    I = T.dense_fixed(m, "int32")
    X = T.dense_fixed(n, "int64")
    A = T.match_sparse_buffer(x, (X,), "int8")
    E = T.match_sparse_buffer(idx, (I,), "int32")
    O = T.match_sparse_buffer(out, (I,), "int8")
    with T.sp_iter([I], "S", "it") as [i]:
        O[i] = A[E[i]]
""")
    text = lower_sparse_iter(func).script()
    assert 'T.Cast("int32", n)' not in text and 'T.Cast("int64", E[vi]) < n' in text


def make_attached():
    """Each vertex weighs its hyperedges' vertices; the weights lie over (E, EV)."""

    weighted = small("weighted", """
with T.sp_iter([V, VE, T.attach(EV, VE)], "SRR", "weighted") as [v, e, u]:
    with T.init():
        Y[v] = 0.0
    Y[v] = Y[v] + W[e, u]
""", """
V = T.dense_fixed(vertices)
VE = T.sparse_variable(V, (edges, nnz), (ve_ptr, ve_idx))
E = T.dense_fixed(edges)
EV = T.sparse_variable(E, (vertices, nnz), (ev_ptr, ev_idx))
""", W="E EV", Y="V")  # fmt: skip

    return weighted


def test_an_attached_axis_is_where_it_stands():
    """The element of (e, u) is where the iteration over (E, EV) stands: no search finds it."""
    func = make_attached()
    assert searches(lower_sparse_iter(func)) == []
    rng = np.random.default_rng(0)
    mask = scipy.sparse.random(7, 5, 0.5, "csr", "float32", rng)
    edges = scipy.sparse.csr_matrix(mask.T)
    edges.data = rng.random(edges.nnz, "float32")
    for matrix in (mask, edges):
        matrix.sort_indices()
    y = np.full(7, np.nan, "float32")
    index = [x.astype("int32") for x in (mask.indptr, mask.indices, edges.indptr, edges.indices)]
    build(func)(edges.data, y, *index, 7, 5, mask.nnz)
    want = (mask != 0) @ np.asarray(edges.sum(axis=1)).reshape(-1)
    np.testing.assert_allclose(y, want, rtol=1e-5)
