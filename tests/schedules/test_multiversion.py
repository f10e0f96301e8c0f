"""Versions of a plain program's kernel, which are chosen by its sizes."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
import scipy.sparse as sp
import scipy.special

import sparsetir
from csr_zoo import ZOO
from machines import MACHINES
from pairs import by_default
from programs import PROGRAMS
from small import small
from sparsetir.machine import assume, this_machine
from sparsetir.schedules.multiversion import WORK_OF_THREADS
from sparsetir.schedules.operators import edge_softmax
from sparsetir.schedules.panels import LENGTH, PACK_DEGREE, panel_bytes
from sparsetir.schedules.targets import host_target, l1_bytes, l3_bytes, vector_bits

VERSIONS = (
    "panels", "wide", "narrow", "rows", "small", "more", "up_to_1", "up_to_64", "above_64"
)  # fmt: skip


@functools.cache
def kernel():
    return sparsetir.build(PROGRAMS["spmm"].make("float32", "int32"))


def spmm_of_64():
    text = PROGRAMS["spmm"].make("float32", "int32").script()
    text = text.replace("dense_fixed(feat", "dense_fixed(64").replace("feat: T.int32", "")
    return sparsetir.from_source(text)


def versions_of(built):
    text = built.stages["II scheduled"].script()
    return tuple(name for name in VERSIONS if f'T.sblock("{name}")' in text)


def check(built, m, n, nnz, feat, dtype="float32"):
    rng = np.random.default_rng(nnz + feat)
    places = np.sort(rng.choice(m * n, nnz, replace=False))
    indptr = np.searchsorted(places // n, np.arange(m + 1)).astype("int32")
    a, indices = rng.random(nnz).astype(dtype), (places % n).astype("int32")
    b, c = rng.random((n, feat)).astype(dtype), np.full((m, feat), np.nan, dtype)
    built(a, b, c, indptr, indices, n=n)
    exact = sp.csr_array((a.astype("float64"), indices, indptr), shape=(m, n)) @ b.astype("float64")
    np.testing.assert_allclose(c, exact, rtol=0.03 if dtype == "float16" else 1e-4)


_, WIDE = panel_bytes(vector_bits(host_target()))
FEW = [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32]


@pytest.mark.parametrize("feat", [*FEW, 33, 63, 64, 65, 96, 97, 127, 128, 160, 161, 192, 259])
@pytest.mark.parametrize("degree", [PACK_DEGREE - 1, PACK_DEGREE])
def test_results_on_both_sides_of_each_choice(feat, degree):
    """Rows that are gathered often and not, and features around each of the widths."""
    check(kernel(), 60, 50, 50 * degree, feat)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_panels_of_each_width(dtype):
    """Of bytes, so that types differ in features; too few for the wide ones, and for all."""
    with assume(MACHINES["1 core"]):
        built = sparsetir.build(PROGRAMS["spmm"].make(dtype, "int32"))
        names = {"panels", "wide", "narrow", "rows"}
        assert names <= {*versions_of(built)}
    for feat in (65, 100, 127, 128, 129, 200):
        check(built, 60, 50, 50 * PACK_DEGREE, feat, dtype)


def test_wide_panels_are_for_rows_that_stay_in_a_cache():
    """The kernel's own condition decides: all rows of B, or those between two uses of one."""
    script = kernel().stages["II scheduled"].script()
    rows = this_machine().caches["L2"] // WIDE
    assert f"* T.int64({WIDE}) <= T.int64({l3_bytes() // 2})" in script
    assert f"J_indices_reuse) * T.int64({WIDE}) > T.int64({l1_bytes()})" in script
    check(kernel(), 3000, rows, PACK_DEGREE * rows, 128)


def test_panels_of_one_width_for_narrow_registers():
    """Those of AVX2, which a wide panel would fill."""
    with assume(MACHINES["no AVX-512"]):
        built = sparsetir.build(PROGRAMS["spmm"].make("float32", "int32"))
        assert {"panels", "rows"} <= {*versions_of(built)} and "wide" not in versions_of(built)
        check(built, 60, 50, 50 * PACK_DEGREE, 192)


def test_rows_of_few_elements_are_not_gathered_from_panels():
    """Each panel visits all rows of the result, here with one element less than is enough."""
    for length in (LENGTH - 1, LENGTH):
        check(kernel(), 1000, 1000 * length // PACK_DEGREE, 1000 * length, 2 * WIDE)


@pytest.mark.parametrize("feat", [4, 7, 16, 31, 48])
def test_results_where_the_work_is_for_threads(feat):
    """Narrow ones, as small as one thread takes and larger."""
    for nnz in (WORK_OF_THREADS // feat - 1, WORK_OF_THREADS // feat + 1):
        check(kernel(), 300, 1000, nnz, feat)


def reuse_of(matrix):
    """The reuse distance that a kernel computes from a pattern, which decides on prefetches."""
    built = sparsetir.build(PROGRAMS["spmm"].make("float32", "int32"))
    computed = built.compute({"indices": matrix.indices})
    assert "J_indices_reuse" in built.stages["III"].script()
    return computed["J_indices_reuse"]


def test_rows_that_are_used_again_soon_are_not_asked_for():
    """A cache holds the working set of a band of 20 columns, however long the band is."""
    size, rng = 40_000, np.random.default_rng(0)
    band = sp.diags_array([np.ones(size, "float32")] * 20, offsets=range(20), shape=(size, size))
    assert reuse_of(sp.csr_array(band)) < 200
    columns = rng.integers(0, size, 4 * size)
    far = sp.csr_array((np.ones(4 * size, "float32"), (np.repeat(np.arange(size), 4), columns)))
    assert reuse_of(far) == far.nnz


def test_the_name_of_what_is_computed_may_be_taken():
    """The parameter is an array or a number of the caller's; or an axis."""
    text, name = PROGRAMS["spmm"].make("float32", "int32").script(), "J_indices_reuse"
    array = text.replace("C[", f"{name}[").replace("C = ", f"{name} = ")
    number = text.replace("feat: T.int32", f"feat: T.int32, {name}: T.int64")
    axis = text.replace("J_ ", f"{name} ").replace("(J_, ", f"({name}, ")
    args = {"a": np.ones(2, "float32"), "b": np.arange(6, dtype="float32").reshape(3, 2)}
    args |= {"indptr": np.array([0, 2], "int32"), "indices": np.array([0, 2], "int32")}
    for taken in (array, number, axis):
        out = np.empty((1, 2), "float32")
        built = sparsetir.build(sparsetir.from_source(taken))
        assert not built.computed
        built(**args, c=out, **({name: 5} if taken is number else {}))
        np.testing.assert_array_equal(out, [[4, 6]])


def test_known_sizes_choose_when_it_is_built():
    """64 features are too few for panels, and no fewer than that."""
    built = sparsetir.build(spmm_of_64())
    assert versions_of(built) == ()
    check(built, 60, 50, 50 * PACK_DEGREE, 64)


# -- sums over features for each element ------------------------------------------------------


@functools.cache
def sampled(name="sddmm_fused", dtype="float32"):
    return sparsetir.build(PROGRAMS[name].make(dtype, "int32"))


def check_sampled(built, matrix, feat, dtype="float32"):
    """Twice with one structure, whose computed arrays are kept."""
    rng = np.random.default_rng(feat)
    indptr, indices = matrix.indptr.astype("int32"), matrix.indices.astype("int32")
    (m, n), rows = matrix.shape, np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    for _ in range(2):
        x, y = rng.random((m, feat)).astype(dtype), rng.random((n, feat)).astype(dtype)
        x[::3] = np.inf
        a = rng.random(matrix.nnz).astype(dtype)
        out = np.full(matrix.nnz, np.nan, dtype)
        built(a, x, y, out, indptr, indices, m=m, n=n, feat=feat)
        expected = (a[:, None] * x[rows] * y[matrix.indices]).sum(axis=1)
        np.testing.assert_allclose(out, expected, rtol=1e-5 if dtype == "float32" else 1e-12)


FEATURES = "0 1 3 4 5 7 8 9 15 16 17 32 33 48 49 64 65 80 81 96 97 112 113 127 128 129 256"


@pytest.mark.parametrize("name", by_default(["sddmm", "sddmm_fused"], "sddmm_fused"))
def test_sampled_products_on_both_sides_of_each_choice(name):
    for feat in map(int, FEATURES.split()):
        check_sampled(sampled(name), ZOO["random"], feat)


@pytest.mark.slow
def test_features_that_come_first_are_brought_behind_the_elements():
    def features_first(sch):
        ref = sch.get_sparse_iteration("sddmm")
        i, j, k = sch.get_sp_iters(ref)
        sch.sparse_reorder(ref, [k, i, j])

    program = PROGRAMS["sddmm"].make("float32", "int32")
    built = sparsetir.build(program, schedule=features_first)
    assert "T.Shuffle" in built.stages["II scheduled"].script()
    check_sampled(built, ZOO["random"], 33)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 15, 16, 17])
def test_sampled_products_of_few_elements(count):
    """Fewer elements than a group, and groups the last of which begins earlier."""
    places = np.arange(count)
    matrix = sp.csr_array((np.ones(count, "float32"), (places // 4, places)), shape=(5, 20))
    for feat in (3, 4, 6, 8, 33, 150):
        check_sampled(sampled(), matrix, feat)


def test_loops_inside_of_elements_stay_inside():
    """Blocks are visited by positions, and the products of each one after the other."""
    func = small("scores", """
with T.sp_iter([IB, JB, II, JI, K], "SSSSR", "scores") as [ib, jb, ii, ji, k]:
    with T.init():
        S[ib, jb, ii, ji] = T.float32(0)
    S[ib, jb, ii, ji] = S[ib, jb, ii, ji] + X[ib, ii, k] * Y[jb, ji, k]
""", """
IB = T.dense_fixed(m)
JB = T.sparse_variable(IB, (n, nnz), (indptr, indices))
II = T.dense_fixed(4)
JI = T.dense_fixed(4)
K = T.dense_fixed(21)
""", X="IB II K", Y="N JI K", S="IB JB II JI")  # fmt: skip
    built, rng = sparsetir.build(func), np.random.default_rng(0)
    assert 'T.sp_iter([IB_JB, II, JI, K], "SSSR"' in built.stages["I"].script()
    blocks = sp.random_array((9, 7), density=0.3, format="csr", rng=rng)
    x, y = (rng.random((size, 4, 21), dtype="float32") for size in (9, 7))
    out = np.empty((blocks.nnz, 4, 4), "float32")
    pattern = {name: getattr(blocks, name).astype("int32") for name in ("indptr", "indices")}
    built(x=x, y=y, s=out, **pattern)
    rows, columns = blocks.nonzero()
    np.testing.assert_allclose(out, x[rows] @ y[columns].transpose(0, 2, 1), rtol=1e-5)


def test_positions_of_slots_run_on_from_row_to_row():
    """Eight slots ahead is in a later row, of the last rows the last slot that there is."""
    func = small("sums", """
with T.sp_iter([I, E, K], "SRS", "sums") as [i, e, k]:
    OUT[i, k] = OUT[i, k] + Y[e, k]
""", "E = T.sparse_fixed(I, (n, kk), slots)", Y="N K", OUT="I K")  # fmt: skip
    text = sparsetir.build(func).stages["II scheduled"].script()
    (ahead,) = set(re.findall(r"prefetch.*E_indices\[i, (.*?)\],", text))
    last = 'T.Cast("int64", m) - T.Cast("int64", i)'
    further = 'T.Cast("int64", e) + T.int64(8)'
    last = f'({last}) * T.Cast("int64", kk) - T.int64(1)'
    assert ahead == f'T.Cast("int32", T.min({further}, {last}))'  # the product may pass 2^31


def test_rows_gathered_by_any_number_of_slots_are_asked_for_ahead():
    func = small("dots", """
with T.sp_iter([I, E, K], "SSR", "dots") as [i, e, k]:
    with T.init():
        OUT[i, e] = T.float32(0)
    OUT[i, e] = OUT[i, e] + X[i, k] * Y[e, k]
""", "E = T.sparse_fixed(I, (n, kk), slots)", X="I K", Y="N K", OUT="I E")  # fmt: skip
    built, rng = sparsetir.build(func), np.random.default_rng(0)
    assert "llvm.prefetch" in built.stages["III"].script()
    m, n, feat, slots = 30, 3000, 150, np.sort(rng.integers(0, 3000, (30, 5)), axis=1)
    x, y = rng.random((m, feat), dtype="float32"), rng.random((n, feat), dtype="float32")
    out = np.empty(slots.shape, "float32")
    built(x, y, out, slots.astype("int32"))
    np.testing.assert_allclose(out, np.einsum("ik,iek->ie", x, y[slots]), rtol=1e-5)


@pytest.mark.parametrize("nested", [False, True])
def test_maxima_over_features_are_in_order(nested):
    """Elements after a NaN may be left out or not, as in the interpreter."""
    heads = ['with T.sp_iter([I, J, K], "SSR", "pairs") as [i, j, k]:']
    if nested:
        heads = ['with T.sp_iter([I], "S", "rows") as [i]:']
        heads += ['    with T.sp_iter([J, K], "SR", "pairs") as [j, k]:']
    func = small("pairs", "\n".join(heads) + """
        with T.init():
            OUT[i, j] = T.float32(-9)
        OUT[i, j] = T.max(OUT[i, j], X[i, k] * Y[j, k])
""", "K = T.dense_fixed(20)", X="I K", Y="N K", OUT="I J")  # fmt: skip
    matrix, rng = ZOO["random"], np.random.default_rng(0)
    x, y = (rng.random((size, 20), dtype="float32") for size in matrix.shape)
    x[:, 1] = np.nan
    arrays = x, y, matrix.indptr.astype("int32"), matrix.indices.astype("int32")
    out, expected = np.empty(matrix.nnz, "float32"), np.empty(matrix.nnz, "float32")
    sparsetir.build(func)(*arrays[:2], out, *arrays[2:])
    sparsetir.interpret(func, [*arrays[:2], expected, *arrays[2:], *matrix.shape, matrix.nnz])
    np.testing.assert_array_equal(out, expected)


def test_booleans_are_reduced_one_by_one():
    """TVM has no vectors of local booleans."""
    func = small("reached", """
with T.sp_iter([I, J, K], "SRS", "reached") as [i, j, k]:
    with T.init():
        OUT[i, k] = T.bool(False)
    OUT[i, k] = OUT[i, k] or (A[i, j] and X[j, k])
""", dtype="bool", A="I J", X="N K", OUT="I K")  # fmt: skip
    matrix, rng = ZOO["random"], np.random.default_rng(0)
    (m, n), a = matrix.shape, rng.random(matrix.nnz) < 0.5
    x, out = rng.random((n, 70)) < 0.2, np.ones((m, 70), bool)
    indptr, indices = matrix.indptr.astype("int32"), matrix.indices.astype("int32")
    sparsetir.build(func)(a, x, out, indptr, indices)
    stored = sp.csr_array((a.astype("int32"), indices, indptr), shape=(m, n))
    np.testing.assert_array_equal(out, stored @ x.astype("int32") > 0)


# Programs that look like those which versions are for, but for one thing.
SIMILAR = {
    "a dense result": small("dense", """
with T.sp_iter([I, J, K], "SSR", "dense") as [i, j, k]:
    with T.init():
        Z[i, j] = 0.0
    Z[i, j] = Z[i, j] + A[i, j] * X[i, k] * Y[j, k]
""", A="I J", X="I K", Y="N K", Z="I N"),
    "a merged axis attached to the features": small("attached", """
with T.sp_iter([I, N, T.intersect(K1, T.attach(K2, N))], "SSR", "attached") as [i, j, k]:
    with T.init():
        Z[i, j] = 0.0
    Z[i, j] = Z[i, j] + A[i, k] * B[j, k]
""", """
I
N
K1 = T.sparse_variable(I, (feat, a_nnz), (a_ptr, a_idx))
K2 = T.sparse_variable(N, (feat, b_nnz), (b_ptr, b_idx))
""", A="I K1", B="N K2", Z="I N"),
    "another loop under the rows": small("under", """
with T.sp_iter([K, I, R, J], "RSSS", "under") as [k, i, r, j]:
    with T.init():
        Z[i, j] = 0.0
    Z[i, j] = Z[i, j] + A[j] * B[k, i, r]
""", "I\nJ\nN\nK\nR = T.dense_variable(I, (n, r_nnz), r_ptr)", A="N", B="K I R", Z="I J"),
}  # fmt: skip


@pytest.mark.parametrize("similar", SIMILAR)
@pytest.mark.default("a merged axis attached to the features")
def test_similar_programs_have_the_default_schedule(similar):
    func, rng = SIMILAR[similar], np.random.default_rng(0)
    args = {"m": 7, "n": 6, "feat": 9}
    for axis in (axis for axis in func.axes if axis.indptr is not None):
        rows, columns = (args[str(x.length.name)] for x in (axis.parent, axis))
        mask = rng.random((rows, columns)) < 0.4
        args[str(axis.indptr.name)] = np.append(0, mask.sum(1).cumsum()).astype("int32")
        args[str(axis.nnz.name)] = int(mask.sum())
        if axis.is_sparse:
            args[str(axis.indices.name)] = mask.nonzero()[1].astype("int32")
    built = sparsetir.build(func)
    names = built.signature.names
    for i in built.signature.arrays:
        if names[i] not in args:
            shape = built.signature.expected_shape(i, [args.get(name) for name in names])
            args[names[i]] = rng.random(shape, "float32")
    args = {name: args[name] for name in names}
    want = {**args, "z": np.zeros_like(args["z"])}
    sparsetir.interpret(func, want)
    built(**args)
    np.testing.assert_allclose(args["z"], want["z"], rtol=1e-5)


@functools.cache
def row_steps_kernel():
    return sparsetir.build(edge_softmax.program(edge_softmax.EdgeSoftmax()))


@pytest.mark.parametrize("case", ["random", "one dense row", "empty", "one column"])
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 8, 9, 17])
def test_steps_of_rows_for_heads_side_by_side(case: str, heads: int) -> None:
    built, matrix = row_steps_kernel(), ZOO[case]
    assert 'T.sblock("from_2")' in built.stages["II scheduled"].script()
    x = np.random.default_rng(heads).random((2 * matrix.nnz, heads), dtype="float32")
    x[1::5, 0] = -90
    out = np.full_like(x, np.nan)
    m, indptr = matrix.shape[0], matrix.indptr.astype("int32")
    built(x=x, out=out, indptr=indptr, batch=2, m=m, nnz=matrix.nnz, heads=heads)
    for batch in (slice(None, matrix.nnz), slice(matrix.nnz, None)):
        for row in map(slice, matrix.indptr, matrix.indptr[1:]):
            if row.start < row.stop:
                expected = scipy.special.softmax(x[batch][row].astype("float64"), 0)
                np.testing.assert_allclose(out[batch][row], expected, rtol=2e-6, atol=1e-12)
    assert not np.isnan(out).any()


def test_a_sum_over_two_sizes():
    """Where the inner loop has one step, a term is left, and the outer one is still a loop."""
    built = sparsetir.build(sparsetir.expression("z = a[i] * b[k]"))
    for m, feat in ((1, 1), (3, 1), (17, 1), (1, 5), (3, 2), (6, 3), (5, 40)):
        a, b, z = np.arange(m, dtype="float32"), np.ones(feat, "float32"), np.zeros((), "float32")
        built(a_values=a, b_values=b, z_values=z)
        assert z == a.sum() * feat, (m, feat)
