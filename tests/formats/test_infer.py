"""Index inference: every kind of axis, against scipy, against dense arrays, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsetir
from format_rules import MATRIX, blocked_csf, csf, matrix, rule
from sparsetir.formats.decompose import decompose_format
from sparsetir.formats.infer_indices import infer_format
from sparsetir.formats.partition import check_partition
from sparsetir.sparse_ir.errors import StructureError


def scatter(order: int) -> Any:
    """OUT = A on the pattern of A, OUT dense: what a format says through the interpreter."""
    names = "IJKL"[:order]
    axes = [f"{n} = T.dense_fixed(n_{n.lower()})" for n in names[:1]]
    for above, n in zip(names, names[1:]):
        low = n.lower()
        axes.append(f"{n} = T.sparse_variable({above}, (n_{low}, nnz_{low}), (p_{low}, x_{low}))")
    axes += [f"{n}_ = T.dense_fixed(n_{n.lower()})" for n in names]
    arrays = ["a", "out", *(f"{p}_{n.lower()}" for n in names[1:] for p in "px")]
    sizes = [f"n_{n.lower()}" for n in names] + [f"nnz_{n.lower()}" for n in names[1:]]
    params = [f"{a}: T.handle" for a in arrays] + [f"{s}: T.int32" for s in sizes]
    index = ", ".join(names.lower())
    lines = [
        *axes,
        f'A = T.match_sparse_buffer(a, ({", ".join(names)}), "float32")',
        f'OUT = T.match_sparse_buffer(out, ({", ".join(f"{n}_" for n in names)}), "float32")',
        f'with T.sp_iter([{", ".join(names)}], "{"S" * order}", "scatter") as [{index}]:',
        f"    OUT[{index}] = A[{index}]",
    ]
    return sparsetir.from_source(
        f"@T.prim_func\ndef f({', '.join(params)}):\n    " + "\n    ".join(lines)
    )


def csf_arguments(coords: list[np.ndarray], shape: Any) -> dict[str, Any]:
    """The original's index arrays, by scipy-free means."""
    names = "ijkl"[: len(shape)]
    known = np.unique(np.stack(coords, axis=1), axis=0) if coords else None
    args: dict[str, Any] = {f"n_{n}": s for n, s in zip(names, shape)}
    above = np.arange(shape[0])[:, None]
    for level in range(1, len(shape)):
        here = np.unique(known[:, : level + 1], axis=0)
        of = {tuple(c): n for n, c in enumerate(above)}
        counts = np.bincount([of[tuple(c[:-1])] for c in here] or [0], minlength=len(above))
        counts = counts if len(here) else np.zeros(len(above), int)
        args[f"p_{names[level]}"] = np.concatenate([[0], np.cumsum(counts)]).astype("int32")
        args[f"x_{names[level]}"] = here[:, -1].astype("int32")
        args[f"nnz_{names[level]}"] = len(here)
        above = here
    return args


def check(r: Any, coords: list[np.ndarray], shape: Any) -> Any:
    """Inference fits the decomposed function, whose interpretation gives the dense array."""
    func = decompose_format(scatter(len(shape)), [r])
    stored = np.arange(1, len(coords[0]) + 1, dtype="float32")
    fmt = infer_format(r, coords, shape)
    values = fmt.values(stored)
    np.testing.assert_array_equal(fmt.restore(values), stored)
    assert values.shape == fmt.shape == fmt.mask.shape
    assert fmt.mask.sum() == len(stored)
    args = csf_arguments(coords, shape) | fmt.arguments
    args |= {f"a_{r.name}": values, "a": np.zeros(len(stored), "float32")}
    args["out"] = np.zeros(shape, "float32")
    sparsetir.check_structure(func, args)
    body = func.body.seq
    compute = func.replace(body=body[1])  # without the copy, which `a` would overwrite
    sparsetir.interpret(compute, args)
    dense = np.zeros(shape, "float32")
    dense[tuple(coords)] = stored
    np.testing.assert_array_equal(args["out"], dense)
    return fmt


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.data())
def test_random_coordinates(data: Any) -> None:
    name = data.draw(st.sampled_from(sorted(MATRIX)))
    shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    cell = st.tuples(*(st.integers(0, s - 1) for s in shape))
    cells = data.draw(st.lists(cell, unique=True, max_size=30))
    coords = list(np.array(cells, np.int64).reshape(-1, 2).T)
    check(matrix(name), coords, shape)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data())
def test_random_tensors(data: Any) -> None:
    order = data.draw(st.integers(3, 4))
    names = "IJKL"[:order]
    shape = data.draw(st.tuples(*[st.integers(1, 5)] * order))
    cell = st.tuples(*(st.integers(0, s - 1) for s in shape))
    cells = data.draw(st.lists(cell, unique=True, max_size=25))
    coords = list(np.array(cells, np.int64).reshape(-1, order).T)
    permutation = data.draw(st.permutations(range(order)))
    blocked = data.draw(st.booleans())
    r = blocked_csf(names, data.draw(st.integers(1, 3))) if blocked else csf(names, permutation)
    check(r, coords, shape)


def test_ell_pads_with_minus_one() -> None:
    rows, cols = np.array([0, 0, 2]), np.array([4, 1, 3])
    fmt = infer_format(matrix("ell"), [rows, cols], (3, 5))
    np.testing.assert_array_equal(fmt.arguments["idx_j2_ell"], [1, 4, -1, -1, 3, -1])
    assert fmt.arguments["cols_j2_ell"] == 2 and fmt.padding == 0.5
    np.testing.assert_array_equal(fmt.values(np.array([1.0, 2, 3])), [2, 1, 0, 0, 3, 0])
    np.testing.assert_array_equal(fmt.mask, [1, 1, 0, 0, 1, 0])


def test_values_keep_their_type_and_refuse_other_lengths() -> None:
    fmt = infer_format(matrix("bsr2"), [np.array([0, 1]), np.array([0, 1])], (2, 2))
    assert fmt.values(np.ones(2, np.float16)).dtype == np.float16
    with pytest.raises(
        ValueError, match=r"'bsr2': argument 'stored': expected shape \(2,\), got \(3"
    ):
        fmt.values(np.ones(3))
    with pytest.raises(
        ValueError, match=r"argument 'values': expected shape \(1, 2, 2\), got \(3,\)"
    ):
        fmt.restore(np.ones(3))


def test_lengths_do_not_depend_on_what_is_stored() -> None:
    for coords in ([np.array([0]), np.array([0])], [np.zeros(0, int), np.zeros(0, int)]):
        args = infer_format(matrix("bsr3"), coords, (10, 8)).arguments
        assert (args["mb_bsr3"], args["nb_bsr3"]) == (4, 3)
    args = infer_format(matrix("bsr3"), [np.zeros(0, int)] * 2, (0, 8)).arguments
    assert (args["mb_bsr3"], args["nb_bsr3"]) == (0, 3)


def test_sizes_may_be_given() -> None:
    coords = [np.array([0, 1]), np.array([3, 1])]
    fmt = infer_format(matrix("ell"), coords, (2, 5), {"cols_j2": 3, "m": 4})
    assert fmt.arguments["cols_j2_ell"] == 3 and fmt.shape == (12,)


def test_sizes_that_are_products() -> None:
    desc = sparsetir.from_source(
        "@T.prim_func\ndef d(a: T.handle, h: T.int32, n: T.int32):\n"
        "    I2 = T.dense_fixed(h * 2)\n    J2 = T.dense_fixed(n)\n"
        '    A = T.match_sparse_buffer(a, (I2, J2), "float32")\n    T.evaluate(0)\n'
    )
    r = sparsetir_rule("halves", desc)
    coords = [np.array([3]), np.array([1])]
    assert infer_format(r, coords, (4, 2), {"h": 2}).shape == (4, 2)
    with pytest.raises(ValueError, match=r"rule 'halves': axis 'I2': length = h \* 2 needs sizes"):
        infer_format(r, coords, (4, 2))


def sparsetir_rule(name: str, desc: Any) -> Any:
    from sparsetir.formats.rule import FormatRewriteRule

    return FormatRewriteRule(
        name, desc, ["A"], ["I", "J"], ["I2", "J2"], {"I": ["I2"], "J": ["J2"]},
        lambda i, j: (i, j), lambda i, j: (i, j),
    )  # fmt: skip


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MATRIX)
def test_a_repeated_coordinate_is_named(name: str) -> None:
    rows, cols = np.array([4, 0, 2, 0, 4]), np.array([1, 3, 2, 3, 1])
    with pytest.raises(StructureError, match=r"coordinate \(0, 3\) is stored twice, or rule"):
        infer_format(matrix(name), [rows, cols], (5, 5))


def bad_rule(idx: Any, inv: Any) -> Any:
    return rule(
        "bad", [("I2", "dense", "m"), ("J2", "sparse", "n", "I2")], "IJ",
        {"I": ["I2"], "J": ["J2"]}, idx, inv,
    )  # fmt: skip


def test_maps_that_are_not_inverse_are_refused_at_the_first_coordinate() -> None:
    coords = [np.array([0, 4, 5]), np.array([2, 1, 1])]
    with pytest.raises(StructureError, match=r"'bad': inv_idx_map does not undo idx_map at "
                       r"coordinate \(5, 1\)"):  # fmt: skip
        infer_format(bad_rule(lambda i, j: (i // 2, j), lambda i, j: (i * 2, j)), coords, (6, 3))
    halves = bad_rule(lambda i, j: (i // 2, j), lambda i, j: (i * 2, j))
    infer_format(halves, [c[:2] for c in coords], (6, 3))  # what is stored comes back


ONE, BIG = np.array([0]), 2**31
ROOM = [np.array([0, 1, 1]), np.array([2, 0, 2])]
REFUSED = [  # (rule, coordinates, shape, sizes, error, message)
    (bad_rule(lambda i, j: (i - 1, j), lambda i, j: (i + 1, j)), ROOM, (3, 3), {}, StructureError,
     r"'bad': axis 'I2' has coordinates in \[0, 2\), none for coordinate \(0, 2\)"),
    (matrix("csr"), ROOM, (3, 3), {"n": 2}, StructureError,
     r"axis 'J2' has coordinates in \[0, 2\), none for coordinate \(0, 2\)"),
    (matrix("ell"), ROOM, (3, 3), {"cols_j2": 1}, StructureError,
     r"axis 'J2' has 1 slots in each row, none for coordinate \(1, 2\)"),
    (matrix("csr"), [ONE, np.array([BIG - 1])], (1, BIG), {}, StructureError,
     r"axis 'J2': length = 2147483648 does not fit int32"),
    (matrix("ell_rows"), [np.arange(4)] * 2, (4, 4), {"cols_j2": 2**30}, StructureError,
     r"axis 'J2': parents \* nnz_cols = 4294967296 does not"),
    (matrix("ragged"), [np.arange(4), np.full(4, 2**29 - 1)], (4, 2**29), {}, StructureError,
     "axis 'J2': nnz = 2147483648 does not fit int32"),
    (matrix("csr"), [ONE] * 2, (1, 1), {"nnz_j2": 2}, StructureError, "expected nnz 1, got 2"),
    (csf("IJ", idtype="int64"), [ONE] * 2, (2**21, 2**42), {}, StructureError,
     "are too many to be told apart"),
    (matrix("csr"), [ONE], (1, 1), {}, ValueError,
     r"'csr': expected coordinates and lengths for the axes \['I', 'J'\], got 1 and 2"),
    (matrix("csr"), [ONE, np.array([0, 0])], (1, 1), {}, ValueError,
     r"axis 'J': expected \(1,\) coordinates, got shape \(2,\)"),
    (matrix("csr"), [np.array([0.5]), ONE], (1, 1), {}, ValueError,
     "axis 'I': expected integers, got float64"),
    (matrix("csr"), [np.array([0, 0]), np.array([0, 2])], (1, 2), {}, StructureError,
     r"axis 'J': expected coordinates in \[0, 2\), got 2 at position 1"),
    (matrix("csr"), [np.array([-1]), ONE], (1, 1), {}, StructureError,
     r"axis 'I': expected coordinates in \[0, 1\), got -1 at"),
    (matrix("ell"), [ONE] * 2, (2, 5), {"rows": 3}, ValueError, r"rule 'ell': argument 'sizes': "
     r"expected some of the scalars \['m', 'n', 'cols_j2'\] of the .*, got 'rows'"),
]  # fmt: skip


@pytest.mark.parametrize(("r", "coords", "shape", "sizes", "error", "message"), REFUSED)
def test_refused(r: Any, coords: Any, shape: Any, sizes: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        infer_format(r, coords, shape, sizes)


def test_numbers_that_int64_holds() -> None:
    wide = matrix("csr", idtype="int64")
    fmt = infer_format(wide, [np.array([0]), np.array([2**31])], (1, 2**32))
    assert fmt.arguments["idx_j2_csr"][0] == 2**31


# -- wide coordinates, speed ----------------------------------------------------------------------


def test_maps_that_leave_int32() -> None:
    """Intermediate numbers pass 2**31 although coordinates and results do not."""
    r = rule(
        "wide", [("I2", "dense", "m"), ("J2", "sparse", "n", "I2")], "IJ",
        {"I": ["I2"], "J": ["J2"]}, lambda i, j: (i * 70000 // 70000, j), lambda i, j: (i, j),
    )  # fmt: skip
    rows = np.array([0, 69999], np.int32)
    fmt = infer_format(r, [rows, np.zeros(2, np.int32)], (70000, 1))
    np.testing.assert_array_equal(fmt.places, [0, 1])


# -- partitions -----------------------------------------------------------------------------------


def test_partitions() -> None:
    """Each coordinate is taken once."""
    coords = [np.array([0, 1, 1, 2]), np.array([3, 0, 2, 1])]
    mask = np.array([True, False, False, True])
    check_partition(coords, [mask, ~mask])
    check_partition(coords, [mask, np.array([2, 1]), np.zeros(0, int), np.zeros(4, bool)])
    check_partition(coords, [np.arange(4, dtype=np.uint8), []])
    check_partition([np.zeros(0, int)] * 2, [])
    for parts, error, message in [
        ([mask, np.array([1])], StructureError, r"no part takes coordinate \(1, 2\)"),
        ([mask, ~mask, np.array([1])], StructureError,
         r"coordinate \(1, 0\) is taken 2 times, by the parts \[1, 2\]"),
        ([mask, np.array([1, 2, 1])], StructureError, r"is taken 2 times, by the parts \[1, 1\]"),
        ([], StructureError, r"no part takes coordinate \(0, 3\)"),
        ([np.ones(3, bool)], ValueError, r"part 0: expected a mask of shape \(4,\), got \(3,\)"),
        ([mask, np.array([0.0])], ValueError,
         "part 1: expected a boolean mask or an array of positions, got float64"),
        ([np.array([0, 4])], ValueError, r"part 0: expected positions in \[0, 4\), got 4"),
        ([np.array([0, -1])], ValueError, r"part 0: expected positions in \[0, 4\), got -1"),
    ]:  # fmt: skip
        with pytest.raises(error, match=message):
            check_partition(coords, parts)
    with pytest.raises(ValueError, match="argument 'coords': expected one-dimensional arrays"):
        check_partition([np.zeros(2, int), np.zeros(3, int)], [])
