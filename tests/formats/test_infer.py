"""Index inference: every kind of axis, against scipy, against dense arrays, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsetir
from format_rules import MATRIX, blocked_csf, csf, matrix
from sparsetir.formats.decompose import decompose_format
from sparsetir.formats.infer_indices import infer_format
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


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MATRIX)
def test_a_repeated_coordinate_is_named(name: str) -> None:
    rows, cols = np.array([4, 0, 2, 0, 4]), np.array([1, 3, 2, 3, 1])
    with pytest.raises(StructureError, match=r"coordinate \(0, 3\) is stored twice, or rule"):
        infer_format(matrix(name), [rows, cols], (5, 5))
