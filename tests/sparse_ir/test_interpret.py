"""The interpreter: every test program against its oracle, and what the language means."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from programs import PROGRAMS, tolerance
from sparsetir.sparse_ir import script as T
from sparsetir.sparse_ir.interpret import interpret

TYPES = [("float32", "int32"), ("float64", "int64"), ("float16", "int32")]


@pytest.mark.parametrize(("dtype", "idtype"), TYPES, ids=[f"{d}-{i}" for d, i in TYPES])
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_equals_its_oracle(name, dtype, idtype):
    program = PROGRAMS[name]
    func = program.make(dtype, idtype)
    for case in program.cases:
        rng = np.random.default_rng(zlib.crc32(f"{name} {case}".encode()))
        args = program.inputs(rng, case, dtype, idtype)
        with np.errstate(all="ignore"):
            expected = program.oracle(args)
        unchanged = {k: np.copy(v) for k, v in args.items() if k not in program.outputs}
        interpret(func, args)
        for output in program.outputs:
            np.testing.assert_allclose(
                args[output].astype(np.float64),
                expected[output],
                **tolerance(dtype),
                err_msg=f"{name}: {case}: {output}",
            )
        for key, before in unchanged.items():
            np.testing.assert_array_equal(args[key], before, err_msg=f"{name}: {case}: {key}")


def csr_args(**more):
    """A 3 x 4 matrix with an empty row: [[0, 1, 0, 2], [], [3, 0, 0, 0]]."""
    return {
        "a": np.array([1, 2, 3], "float32"),
        "indptr": np.array([0, 2, 2, 3], "int32"),
        "indices": np.array([1, 3, 0], "int32"),
        "m": 3,
        "n": 4,
        "nnz": 3,
        **more,
    }


def test_absent_reads_give_zero():
    @T.prim_func
    def dense(
        a: T.handle, b: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices))
        K = T.dense_fixed(6)
        A = T.match_sparse_buffer(a, (I, J))
        B = T.match_sparse_buffer(b, (I, K))
        with T.sp_iter([I, K], "SS", "copy") as [i, k]:
            B[i, k] = A[i, k - 1]

    args = csr_args(b=np.full((3, 6), np.nan, "float32"))
    interpret(dense, args)
    expected = [[0, 0, 1, 0, 2, 0], [0] * 6, [0, 3, 0, 0, 0, 0]]
    np.testing.assert_array_equal(args["b"], expected)


def test_absent_writes_are_discarded():
    @T.prim_func
    def spread(
        a: T.handle, b: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices))
        K = T.dense_fixed(n + 3)
        A = T.match_sparse_buffer(a, (I, J))
        B = T.match_sparse_buffer(b, (K,))
        with T.sp_iter([I, K], "SS", "spread") as [i, k]:
            A[i - 1, k - 2] = B[k]

    args = csr_args(b=np.arange(7, dtype="float32"))
    interpret(spread, args)
    np.testing.assert_array_equal(args["a"], [3, 5, 3])  # row 2 is never written


def test_beyond_the_end_of_a_ragged_row():
    @T.prim_func
    def pad(a: T.handle, b: T.handle, indptr: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
        I = T.dense_fixed(m)
        J = T.dense_variable(I, (n, nnz), indptr)
        K = T.dense_fixed(n)
        A = T.match_sparse_buffer(a, (I, J))
        B = T.match_sparse_buffer(b, (I, K))
        with T.sp_iter([I, K], "SS", "pad") as [i, k]:
            B[i, k] = A[i, k]

    b = np.full((3, 2), np.nan, "float32")
    indptr = np.array([0, 2, 2, 3], "int32")
    interpret(pad, [np.array([1, 2, 3], "float32"), b, indptr, 3, 2, 3])
    np.testing.assert_array_equal(b, [[1, 2], [0, 0], [3, 0]])


def test_init_runs_for_coordinates_that_are_not_stored():
    @T.prim_func
    def column_count(
        c: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32
    ):
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices))
        J_ = T.dense_fixed(n)
        C = T.match_sparse_buffer(c, (J_,), "int64")
        with T.sp_iter([I, J], "RS", "count") as [i, j]:
            with T.init():
                C[j] = T.int64(10)
            C[j] = C[j] + T.int64(1)

    args = csr_args(c=np.full(4, -1, "int64"))
    del args["a"]
    interpret(column_count, args)
    np.testing.assert_array_equal(args["c"], [11, 11, 10, 11])


def test_init_runs_each_time_a_nested_iteration_is_reached():
    @T.prim_func
    def totals(
        a: T.handle, y: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices))
        A = T.match_sparse_buffer(a, (I, J))
        Y = T.match_sparse_buffer(y, (I,))
        with T.sp_iter([I], "S", "rows") as [i]:
            x = T.float32(0)
            with T.sp_iter([J], "R", "total") as [j]:
                with T.init():
                    x = T.float32(0)
                x = x + A[i, j]
            Y[i] = x

    args = csr_args(y=np.full(3, np.nan, "float32"))
    interpret(totals, args)
    np.testing.assert_array_equal(args["y"], [3, 0, 3])


def test_init_of_a_reduction_variable_is_refused():
    @T.prim_func(check_well_formed=False)
    def bad(y: T.handle, m: T.int32):
        I = T.dense_fixed(m)
        Y = T.match_sparse_buffer(y, (I,))
        with T.sp_iter([I], "R", "sum") as [i]:
            with T.init():
                Y[i] = 0.0
            Y[i] = Y[i] + T.float32(1)

    with pytest.raises(ValueError, match="bad: sp_iter 'sum': the init uses 'i' of reduction axis"):
        interpret(bad, [np.zeros(2, "float32"), 2])


def test_allocated_buffers_start_as_garbage():
    @T.prim_func
    def leak(x: T.handle, y: T.handle, z: T.handle, m: T.int32):
        I = T.dense_fixed(m)
        X = T.match_sparse_buffer(x, (I,), "float16")
        Y = T.match_sparse_buffer(y, (I,), "int32")
        Z = T.match_sparse_buffer(z, (I,), "float32")
        A = T.alloc_sparse_buffer((I,), "float16")
        B = T.alloc_sparse_buffer((I,), "int32")
        C = T.alloc_buffer((2,), "float32")
        with T.sp_iter([I], "S", "copy") as [i]:
            X[i] = A[i]
            Y[i] = B[i]
            Z[i] = C[1]

    x, y, z = np.zeros(2, "float16"), np.zeros(2, "int32"), np.zeros(2, "float32")
    interpret(leak, [x, y, z, 2])
    assert np.isnan(x).all() and (y == 2**31 - 1).all() and np.isnan(z).all()


def test_padded_slots_are_not_visited():
    @T.prim_func
    def visit(a: T.handle, y: T.handle, count: T.handle, indices: T.handle):
        I = T.dense_fixed(2)
        J = T.sparse_fixed(I, (5, 3), indices)
        A = T.match_sparse_buffer(a, (I, J))
        Y = T.match_sparse_buffer(y, (I,))
        N = T.match_sparse_buffer(count, (I,), "int32")
        with T.sp_iter([I, J], "SR", "sum") as [i, j]:
            with T.init():
                Y[i] = 0.0
                N[i] = 0
            Y[i] = Y[i] + A[i, j]
            N[i] = N[i] + 1

    a = np.array([1, np.nan, 2, np.nan, np.nan, np.nan], "float32")
    y, count = np.zeros(2, "float32"), np.zeros(2, "int32")
    interpret(visit, [a, y, count, np.array([4, -1, 0, -1, -1, -7], "int32")])
    np.testing.assert_array_equal(y, [3, 0])
    np.testing.assert_array_equal(count, [2, 0])


def test_duplicates_have_positions_of_their_own():
    @T.prim_func
    def double(a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, rows: T.handle):
        O = T.dense_fixed(1)
        I = T.sparse_variable(O, (4, 3), (indptr, rows), unique=False)
        A = T.match_sparse_buffer(a, (O, I))
        B = T.match_sparse_buffer(b, (O, I))
        C = T.match_sparse_buffer(c, (O, I))
        with T.sp_iter([O, I], "SS", "double") as [o, i]:
            with T.init():
                C[o, i] = T.float32(0)
            B[o, i] = A[o, i] + A[o, i]
            C[o, i] = C[o, i] + A[o, i + 0]

    b, c = np.full(3, np.nan, "float32"), np.full(3, np.nan, "float32")
    indptr, rows = np.array([0, 3], "int32"), np.array([2, 2, 3], "int32")
    interpret(double, [np.array([1, 2, 3], "float32"), b, c, indptr, rows])
    np.testing.assert_array_equal(b, [2, 4, 6])
    # an index that is not the iteration's variable itself is searched: the first match
    np.testing.assert_array_equal(c, [1, 2, 3])


def test_an_own_coordinate_under_another_parent_is_searched():
    @T.prim_func
    def above(
        a: T.handle, b: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices))
        A = T.match_sparse_buffer(a, (I, J))
        B = T.match_sparse_buffer(b, (I, J))
        with T.sp_iter([I, J], "SS", "above") as [i, j]:
            B[i, j] = A[i - 2, j] + A[i + 2, j]

    args = csr_args(indices=np.array([0, 3, 0], "int32"), b=np.full(3, np.nan, "float32"))
    interpret(above, args)
    np.testing.assert_array_equal(args["b"], [3, 0, 1])


def test_init_does_not_see_the_positions_of_an_earlier_run():
    @T.prim_func
    def again(
        a: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32
    ):
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices))
        A = T.match_sparse_buffer(a, (I, J))
        for t in range(2):
            with T.sp_iter([I, J], "SS", "count") as [i, j]:
                with T.init():
                    A[i, j] = T.Cast("float32", t * 10)
                A[i, j] = A[i, j] + T.float32(1)

    args = csr_args()
    interpret(again, args)
    np.testing.assert_array_equal(args["a"], [11, 11, 11])


def test_an_inner_iteration_over_an_axis_gives_the_outer_one_back():
    @T.prim_func(check_well_formed=False)  # the verifier refuses it; the interpreter need not
    def twice(
        a: T.handle, b: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices))
        A = T.match_sparse_buffer(a, (I, J))
        B = T.match_sparse_buffer(b, (I,))
        with T.sp_iter([I], "S", "outer") as [i]:
            with T.sp_iter([I], "R", "inner") as [r]:
                with T.init():
                    B[i] = T.float32(0)
                B[i] = B[i] + T.float32(100)
            with T.sp_iter([J], "R", "row") as [j]:
                B[i] = B[i] + A[i, j]

    args = csr_args(b=np.full(3, np.nan, "float32"))
    interpret(twice, args)
    np.testing.assert_array_equal(args["b"], [303, 300, 303])


def test_storage_of_heads_before_a_sparse_matrix():
    @T.prim_func
    def heads(
        a: T.handle, b: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32,
    ):  # fmt: skip
        H = T.dense_fixed(2)
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices))
        F = T.dense_fixed(3)
        A = T.match_sparse_buffer(a, (I, J))
        B = T.match_sparse_buffer(b, (H, I, J, F))
        with T.sp_iter([H, I, J, F], "SSSS", "spread") as [h, i, j, f]:
            B[h, i, j, f] = A[i, j] * T.float32(100) + T.Cast("float32", h * 10 + f)

    args = csr_args(b=np.full((6, 3), np.nan, "float32"))
    interpret(heads, args)
    expected = np.array([1, 2, 3])[:, None] * 100 + np.arange(3)
    np.testing.assert_array_equal(args["b"], [*expected, *(expected + 10)])


def test_an_axis_without_its_parent():
    @T.prim_func(check_well_formed=False)
    def orphan(
        a: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32
    ):
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices))
        A = T.match_sparse_buffer(a, (I, J))
        with T.sp_iter([J], "S", "alone") as [j]:
            A[0, j] = T.float32(1)

    with pytest.raises(ValueError, match="orphan: sp_iter 'alone': axis 'J' is visited outside"):
        interpret(orphan, csr_args())
