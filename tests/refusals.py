"""Tables of calls and what each is refused with: `call  # ValueError: words .. words`, in order.

A row begins at the margin; it may go on in indented lines, and ends with its comment. All know
np, sp (scipy.sparse), torch and sparsetir.
"""

from __future__ import annotations

import re
import textwrap
from collections import ChainMap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir

__all__ = ["in_order", "refusals", "refuse"]


def in_order(text: str, words: list[str]) -> None:
    """The words are in a text, one after the other."""
    begin = 0
    for word in words:
        word = word.removeprefix("- ")
        assert word in text[begin:], f"{word!r} is not in {text[begin:]!r}"
        begin = text.index(word, begin) + len(word)


def rows(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """(code, name of the error's class, words) of each row."""
    for row in re.split(r"\n(?=\S)", textwrap.dedent(text).strip()):
        match = re.fullmatch(r"(.*?)\s*# (\w+): (.*)", row, re.DOTALL)
        assert match, f"expected `call  # Error: words`, got {row!r}"
        yield match[1], match[2], " ".join(match[3].split()).split(" .. ")


def refused(code: str, error: str, words: list[str], names: dict[str, Any]) -> None:
    """A call ends with an error of this class, or of one below it, whose text has the words."""
    import torch

    with pytest.raises(Exception) as raised:
        exec(code, {"np": np, "sp": sp, "sparsetir": sparsetir, "torch": torch, **names})
    kinds = [kind.__name__ for kind in type(raised.value).__mro__]
    assert error in kinds, f"{code}: {raised.value!r}"
    in_order(" ".join(str(raised.value).split()), words)


def refuse(text: str, *names: dict[str, Any]) -> None:
    """Each call of a table raises its error; `names` are globals and locals of the test."""
    for code, error, words in rows(text):
        refused(code, error, words, dict(ChainMap(*reversed(names))))


def refusals(text: str, names: dict[str, Any], *others: Any) -> Callable[..., None]:
    """A test of each row; `names` are the globals of the tests' file, `others` have names too."""
    named = {other.__name__: other for other in others}

    @pytest.mark.parametrize(
        ("code", "error", "words"), [pytest.param(*row, id=row[0]) for row in rows(text)]
    )
    def test(code: str, error: str, words: list[str]) -> None:
        refused(code, error, words, {**names, **named})

    return test
