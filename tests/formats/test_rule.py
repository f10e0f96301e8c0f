"""Rewrite rules, the paper's as printed, and inference of their indices; what is refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import strategies as st

import sparsetir
from drawing import examples
from format_rules import MATRIX, blocked_csf, csf, matrix
from sparsetir.formats.decompose import decompose_format
from sparsetir.formats.infer_indices import infer_format
from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.sparse_ir import script as T
from sparsetir.sparse_ir.errors import StructureError


def BSR(block_size: int) -> FormatRewriteRule:
    """Appendix A, its typos aside."""

    @T.prim_func
    def bsr_desc(
        a: T.handle,
        indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32,
    ) -> None:  # fmt: skip
        IO = T.dense_fixed(m, idtype="int32")
        JO = T.sparse_variable(IO, (n, nnz), (indptr, indices), idtype="int32")
        II = T.dense_fixed(block_size, idtype="int32")
        JI = T.dense_fixed(block_size, idtype="int32")
        A = T.match_sparse_buffer(a, (IO, JO, II, JI), "float32")

    return FormatRewriteRule(
        "bsr_{}".format(str(block_size)),  # noqa: UP032
        bsr_desc,
        ["A"], ["I", "J"], ["IO", "JO", "II", "JI"],
        {"I": ["IO", "II"], "J": ["JO", "JI"]},
        lambda i, j: (i // block_size, j // block_size, i % block_size, j % block_size),
        lambda io, jo, ii, ji: (io * block_size + ii, jo * block_size + ji),
    )  # fmt: skip


def fields(**changes: Any) -> dict[str, Any]:
    of = BSR(2)
    names = (
        "name", "new_format_desc", "buffers_to_rewrite", "axes_before_rewrite",
        "axes_after_rewrite", "axis_map", "idx_map", "inv_idx_map",
    )  # fmt: skip
    return {n: getattr(of, n) for n in names} | changes


def desc(*lines: str, params: str = "a: T.handle, b: T.handle, mask: T.handle") -> Any:
    head = f"@T.prim_func\ndef d({params}, m: T.int32, n: T.int32):\n"
    axes = ["I2 = T.dense_fixed(m)", "J2 = T.dense_fixed(n)"]
    return sparsetir.from_source(head + "".join(f"    {line}\n" for line in [*axes, *lines]))


MATCH = 'A = T.match_sparse_buffer(a, (I2, J2), "float32")'
LOOP = 'with T.sp_iter([I2, J2], "SS", "it") as [i, j]:\n        A[i, j] = 0.0'


MASK_OF_B = desc(MATCH, 'MASK = T.match_sparse_buffer(b, (I2,), "int8")',
                 params="a: T.handle, b: T.handle")  # fmt: skip
MASK = desc(MATCH, 'M = T.match_sparse_buffer(mask, (I2,), "int8")')
WORDS = "expected a list of different names, got"
REFUSED = [
    ("name", "bsr 2", "expected letters, digits and underscores, got 'bsr 2'"),
    ("name", 2, "expected letters, digits and underscores, got 2"),
    ("new_format_desc", 3, "expected a stage-I function, got int"),
    ("new_format_desc", desc(MATCH, LOOP), "expected axes and buffers alone, got a body"),
    ("new_format_desc", MASK, "expected no parameter 'mask' and no buffer 'MASK', got one"),
    ("new_format_desc", MASK_OF_B, "expected no parameter 'mask' and no buffer 'MASK', got one"),
    ("buffers_to_rewrite", [], "expected at least one buffer, got none"),
    ("buffers_to_rewrite", "A", f"{WORDS} 'A'"),
    ("buffers_to_rewrite", ["A", "A"], f"{WORDS} ['A', 'A']"),
    ("axes_before_rewrite", ["I", "I"], f"{WORDS} ['I', 'I']"),
    ("buffers_to_rewrite", ["X"], "expected 'X' in the description, got ['A']"),
    ("axes_after_rewrite", ["IO", "JO", "JI", "II"], "expected the axes ['IO', 'JO', 'II', 'JI']"),
    ("axis_map", {"I": ["IO"]}, "expected an entry for each of ['I', 'J'], got ['I']"),
    ("axis_map", {"I": ["IO", "II"], "J": ["JO", "II"]}, "['IO', 'JO', 'II', 'JI'] once "
     "among its values, got ['IO', 'II', 'JO', 'II']"),
    ("idx_map", None, "expected a function of coordinates, got None"),
    ("idx_map", lambda i: i, "expected a function of 2 coordinates, got TypeError: "),
    ("inv_idx_map", lambda i, j: i, "expected a function of 4 coordinates, got "),
    ("idx_map", lambda i, j: (i, j), "expected 4 coordinates, got 2"),
    ("inv_idx_map", lambda io, jo, ii, ji: io, "expected 2 coordinates, got 1"),
    ("idx_map", lambda i, j: (i // 0, j, i, j), "of 2 coordinates, got InternalError: "),
    ("idx_map", lambda i, j: (i if i < j else j, j, i, j), "of 2 coordinates, got ValueError: "),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "value", "words"), REFUSED)
def test_refusals(argument: str, value: Any, words: str) -> None:
    name = value if argument == "name" else "bsr_2"
    message = re.escape(f"FormatRewriteRule '{name}': argument '{argument}': expected ")
    with pytest.raises(
        ValueError, match=f"{message}.*{re.escape(words.removeprefix('expected '))}"
    ):
        FormatRewriteRule(**fields(**{argument: value}))


outside = tvm.tirx.Var("outside", "int64")

NOT_AFFINE = [
    lambda i, j: (i * j, j, i, j),
    lambda i, j: (i // j, j, i, j),
    lambda i, j: (i % j, j, i, j),
    lambda i, j: (i // -2, j, i, j),
    lambda i, j: (i % -2, j, i, j),
    lambda i, j: (tvm.tirx.max(i, j), j, i, j),
    lambda i, j: (i + outside, j, i, j),
    lambda i, j: (i * 1.5, j, i, j),
    lambda i, j: (1.5, j, i, j),
    lambda i, j: (tvm.tirx.truncdiv(i, 2), j, i, j),
    lambda i, j: ((i * j) // 2, j, i, j),
    lambda i, j: ((i * j) % 2, j, i, j),
    lambda i, j: ((i * j) * 2, j, i, j),
    lambda i, j: ("i", j, i, j),
]


@pytest.mark.parametrize("idx_map", NOT_AFFINE, ids=range(len(NOT_AFFINE)))
def test_maps_that_cannot_be_inverted(idx_map: Any) -> None:
    message = (
        "FormatRewriteRule 'bsr_2': argument 'idx_map': expected affine expressions, with floor "
        "division and remainder by positive constants, got "
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        FormatRewriteRule(**fields(idx_map=idx_map))


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
    elements = np.unique(np.stack(coords, axis=1), axis=0) if coords else None
    args: dict[str, Any] = {f"n_{n}": s for n, s in zip(names, shape)}
    above = np.arange(shape[0])[:, None]
    for level in range(1, len(shape)):
        here = np.unique(elements[:, : level + 1], axis=0)
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


@examples(20, 500, data=st.data())
def test_random_coordinates(data: Any) -> None:
    name = data.draw(st.sampled_from(sorted(MATRIX)))
    shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    cell = st.tuples(*(st.integers(0, s - 1) for s in shape))
    cells = data.draw(st.lists(cell, unique=True, max_size=30))
    coords = list(np.array(cells, np.int64).reshape(-1, 2).T)
    check(matrix(name), coords, shape)


@examples(15, 500, data=st.data())
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


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MATRIX)
def test_a_repeated_coordinate_is_refused(name: str) -> None:
    rows, cols = np.array([4, 0, 2, 0, 4]), np.array([1, 3, 2, 3, 1])
    with pytest.raises(StructureError, match=r"coordinate \(0, 3\) is stored twice, or rule"):
        infer_format(matrix(name), [rows, cols], (5, 5))
