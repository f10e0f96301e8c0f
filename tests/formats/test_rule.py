"""Rewrite rules: the paper's as printed, and what is no rule."""

from __future__ import annotations

import re
from typing import Any

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
def test_maps_that_are_not_affine(idx_map: Any) -> None:
    message = (
        "FormatRewriteRule 'bsr_2': argument 'idx_map': expected affine expressions, with floor "
        "division and remainder by positive constants, got "
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        FormatRewriteRule(**fields(idx_map=idx_map))
