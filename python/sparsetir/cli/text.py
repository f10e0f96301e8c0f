"""Texts of programs for people: shapes that can be read, colours on a terminal."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from sparsetir.runtime.texts import WIDTH, Section, aligned, fitted

if TYPE_CHECKING:
    from tvm import tirx

    from sparsetir.sparse_ir.nodes import SparseFunc

# Of pygments, by what a stage is.
LEXERS = {"source": "LlvmLexer", "cuda": "CudaLexer", "asm": "GasLexer"}


def readable(func: tirx.PrimFunc | SparseFunc) -> str:
    """The text of a function of any stage.

    Of a PrimFunc without what only our passes read, with a parameter to a line where they do not
    fit one, and sizes without the quotes that the first ones would have.
    """
    from tvm import tirx

    if isinstance(func, tirx.PrimFunc) and func.attrs is not None:
        for name in [str(name) for name in func.attrs.keys()]:
            func = func.without_attr(name) if name.startswith("sparsetir.") else func
    lines = func.script().rstrip("\n").splitlines()
    lines = [line for line in lines if not line.startswith("# Metadata omitted")]
    return "\n".join(map(_signature, lines)).rstrip("\n")


def _signature(line: str) -> str:
    """A line of a `def`, with its parameters below each other if it is long."""
    found = re.fullmatch(r"(\s*def \w+\()(.*)(\).*:)", line)
    if found is None:
        return line
    begin, inside, end = found.groups()
    inside = re.sub(r"T\.Buffer\(\([^)]*\)", lambda shape: shape[0].replace('"', ""), inside)
    if len(begin + inside + end) <= WIDTH:
        return begin + inside + end
    indent = " " * (len(begin) - len(begin.lstrip()) + 4)
    rows = [indent]
    for part in re.split(r", (?=\w+: )", inside):
        if len(rows[-1] + part) >= WIDTH and rows[-1].strip():
            rows.append(indent)
        rows[-1] += part + ", "
    return "\n".join([begin, *(row.rstrip() for row in rows), indent[4:] + end])


def coloured(text: str, kind: str = "") -> str:
    """The text with the colours of a terminal, if it goes to one that wants them.

    kind : "source", "cuda" or "asm"; else it is Python
    """
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    try:
        pygments = import_module("pygments")
        lexer = getattr(import_module("pygments.lexers"), LEXERS.get(kind, "PythonLexer"))()
        formatter = import_module("pygments.formatters").TerminalFormatter()
    except (ImportError, AttributeError):  # no requirement
        return text
    return pygments.highlight(text, lexer, formatter).rstrip("\n")


def as_text(title: str, sections: Sequence[Section], *, folded: bool) -> str:
    """Sections for a terminal, in colours where it has them."""
    out = [title]
    for section in sections:
        shown = section.folded if folded else ()
        if not (section.text or section.rows or section.code or shown):
            continue
        out += ["", section.title, "-" * len(section.title)]
        out += [fitted(line, 2) for line in section.text]
        out += aligned(section.table) if section.rows else []
        if section.code:
            out.append(coloured(section.code))
        for name, code in shown:
            out += ["", f"{name}:", coloured(code)]
    return "\n".join(out)
