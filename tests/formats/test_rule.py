"""Rewrite rules: the paper's as printed, and what is no rule."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tvm

import sparsetir
from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.sparse_ir import script as T


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


def ELL(nnz_cols: int) -> FormatRewriteRule:
    """Appendix A, its typos aside."""

    @T.prim_func
    def ell_desc(
        a: T.handle,
        indices: T.handle,
        m: T.int32, n: T.int32,
    ) -> None:  # fmt: skip
        I2 = T.dense_fixed(m, idtype="int32")
        J2 = T.sparse_fixed(I2, (n, nnz_cols), indices, idtype="int32")
        A = T.match_sparse_buffer(a, (I2, J2), "float32")

    return FormatRewriteRule(
        "ell_{}".format(str(nnz_cols)),  # noqa: UP032
        ell_desc,
        ["A"], ["I", "J"], ["I2", "J2"],
        {"I": ["I2"], "J": ["J2"]},
        lambda i, j: (i, j),
        lambda i2, j2: (i2, j2),
    )  # fmt: skip


def test_the_papers_rules() -> None:
    bsr, ell = BSR(2), ELL(3)
    assert (bsr.name, ell.name) == ("bsr_2", "ell_3")
    assert bsr.axis("JO").parent.name == "IO" and bsr.renamed("JO") == "JO_bsr_2"
    assert ell.axis("J2").kind == "sparse_fixed"
    coords = [np.array([5, 2]), np.array([1, 7])]
    new = bsr.to_new(coords)
    np.testing.assert_array_equal(new, [[2, 1], [0, 3], [1, 0], [1, 1]])
    np.testing.assert_array_equal(bsr.to_old(new), coords)
    before, after, back = bsr.maps
    assert [v.name for v in before] == ["i", "j"] and len(after) == 4 and len(back) == 2


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "bsr 2"}, "'name': expected letters, digits and underscores, got 'bsr 2'"),
        ({"name": 2}, "'name': expected letters, digits and underscores, got 2"),
        ({"new_format_desc": 3}, "'new_format_desc': expected a stage-I function, got int"),
        (
            {"new_format_desc": desc(MATCH, LOOP)},
            "'new_format_desc': expected axes and buffers alone, got a body with statements",
        ),
        (
            {"new_format_desc": desc(MATCH, 'M = T.match_sparse_buffer(mask, (I2,), "int8")')},
            "'new_format_desc': expected no parameter 'mask' and no buffer 'MASK', got one",
        ),
        (
            {
                "new_format_desc": desc(
                    MATCH,
                    'MASK = T.match_sparse_buffer(b, (I2,), "int8")',
                    params="a: T.handle, b: T.handle",
                )
            },
            "'new_format_desc': expected no parameter 'mask' and no buffer 'MASK', got one",
        ),
        (
            {"buffers_to_rewrite": []},
            "'buffers_to_rewrite': expected at least one buffer, got none",
        ),
        (
            {"buffers_to_rewrite": "A"},
            "'buffers_to_rewrite': expected a list of different names, got 'A'",
        ),
        (
            {"buffers_to_rewrite": ["A", "A"]},
            "'buffers_to_rewrite': expected a list of different names, got ['A', 'A']",
        ),
        (
            {"axes_before_rewrite": ["I", "I"]},
            "'axes_before_rewrite': expected a list of different names, got ['I', 'I']",
        ),
        (
            {"buffers_to_rewrite": ["X"]},
            "'buffers_to_rewrite': expected 'X' in the description, got ['A']",
        ),
        (
            {"axes_after_rewrite": ["IO", "JO", "JI", "II"]},
            "'axes_after_rewrite': expected the axes ['IO', 'JO', 'II', 'JI'] of buffer 'A', got "
            "['IO', 'JO', 'JI', 'II']",
        ),
        (
            {"axis_map": {"I": ["IO"]}},
            "'axis_map': expected an entry for each of ['I', 'J'], got ['I']",
        ),
        (
            {"axis_map": {"I": ["IO", "II"], "J": ["JO", "II"]}},
            "'axis_map': expected each of ['IO', 'JO', 'II', 'JI'] once among its values, got "
            "['IO', 'II', 'JO', 'II']",
        ),
        ({"idx_map": None}, "'idx_map': expected a function of coordinates, got None"),
        (
            {"idx_map": lambda i: i},
            "'idx_map': expected a function of 2 coordinates, got TypeError: ",
        ),
        (
            {"inv_idx_map": lambda i, j: i},
            "'inv_idx_map': expected a function of 4 coordinates, got ",
        ),
        ({"idx_map": lambda i, j: (i, j)}, "'idx_map': expected 4 coordinates, got 2"),
        (
            {"inv_idx_map": lambda io, jo, ii, ji: io},
            "'inv_idx_map': expected 2 coordinates, got 1",
        ),
        (
            {"idx_map": lambda i, j: (i // 0, j, i, j)},
            "'idx_map': expected a function of 2 coordinates, got InternalError: ",
        ),
        (
            {"idx_map": lambda i, j: (i if i < j else j, j, i, j)},
            "'idx_map': expected a function of 2 coordinates, got ValueError: ",
        ),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    name = changes.get("name", "bsr_2")
    with pytest.raises(
        ValueError, match=re.escape(f"FormatRewriteRule '{name}': argument {message}")
    ):
        FormatRewriteRule(**fields(**changes))


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
def test_maps_that_are_not_affine(idx_map: Any) -> None:
    message = (
        "FormatRewriteRule 'bsr_2': argument 'idx_map': expected affine expressions, with floor "
        "division and remainder by positive constants, got "
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        FormatRewriteRule(**fields(idx_map=idx_map))


AFFINE = [
    lambda i, j: (0, j, i, j),
    lambda i, j: (-i, j, i, j),
    lambda i, j: [3 * i - 2 * j + 1, j, i, j],
    lambda i, j: ((i + j) // 3 % 2, j, i, j),
    lambda i, j: (tvm.tirx.Cast("int32", i), j, i, j),
]


@pytest.mark.parametrize("idx_map", AFFINE, ids=range(len(AFFINE)))
def test_maps_that_are_affine(idx_map: Any) -> None:
    assert len(FormatRewriteRule(**fields(idx_map=idx_map)).maps[1]) == 4


def test_a_map_of_one_coordinate_needs_no_tuple() -> None:
    one = sparsetir.from_source(
        "@T.prim_func\ndef d(a: T.handle, n: T.int32):\n    I2 = T.dense_fixed(n)\n"
        '    A = T.match_sparse_buffer(a, (I2,), "float32")\n    T.evaluate(0)\n'
    )
    r = FormatRewriteRule("one", one, ["A"], ["I"], ["I2"], {"I": ["I2"]}, lambda i: i, lambda i: i)
    assert r.to_new([7]) == (7,) == r.to_old([7])
