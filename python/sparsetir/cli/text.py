"""Texts of programs for people: shapes that can be read, colours on a terminal; plurals."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from typing import Any

WIDTH = 100  # of tables and signatures, in characters
# Of pygments, by what a stage is.
LEXERS = {"source": "LlvmLexer", "cuda": "CudaLexer", "asm": "GasLexer"}


def many(count: int, one: str, several: str = "") -> str:
    """ "1 record", "2 records"; several : where that is not made by an s."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def fitted(line: str, indent: int) -> str:
    """A line of a table, gone on in the next ones where it is too long."""
    return textwrap.fill(
        line, WIDTH, drop_whitespace=True, subsequent_indent=" " * indent, break_long_words=False
    )


def readable(func: Any) -> str:
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


STYLE = """
:root{color-scheme:light dark}
body{max-width:1060px;margin:0 auto;padding:1rem;line-height:1.5;
font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1{font-size:1.35rem}h2{font-size:1.05rem;margin-top:2rem}
pre,.wide{overflow-x:auto}
pre{font-size:.85rem;padding:.6rem;border:1px solid #8886;border-radius:6px}
table{border-collapse:collapse;font-size:.9rem}
th,td{text-align:left;vertical-align:top;padding:.3rem .8rem .3rem 0;border-bottom:1px solid #8886}
td:last-child{min-width:16em}
summary{cursor:pointer}
"""


@dataclass(frozen=True)
class Section:
    """A heading with paragraphs, a table and code, each where there is some.

    rows : of the table, its heads first where `heads`
    folded : (title, code) that an HTML page shows on demand, and a terminal only if asked
    """

    title: str
    text: Sequence[str] = ()
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    code: str = ""
    folded: Sequence[tuple[str, str]] = field(default=())


def as_text(title: str, sections: Sequence[Section], *, folded: bool) -> str:
    """For a terminal, in colours where it has them."""
    out = [title]
    for section in sections:
        shown = section.folded if folded else ()
        if not (section.text or section.rows or section.code or shown):
            continue
        out += ["", section.title, "-" * len(section.title)]
        out += [fitted(line, 2) for line in section.text]
        out += _aligned([section.heads] * bool(section.heads) + list(section.rows))
        if section.code:
            out.append(coloured(section.code))
        for name, code in shown:
            out += ["", f"{name}:", coloured(code)]
    return "\n".join(out)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    indent = sum(widths) + 2 * len(widths)
    lines = (
        "  ".join([*(f"{x:{w}}" for x, w in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    )
    return [fitted(line, indent) for line in lines]


def as_markdown(title: str, sections: Sequence[Section]) -> str:
    """With tables of pipes and fenced code."""
    out = [f"# {title}", ""]
    for section in sections:
        out += [f"## {section.title}", ""]
        out += [part for line in section.text for part in (line, "")]
        if section.rows:
            heads = section.heads or [""] * len(section.rows[0])
            rows = [heads, ["---"] * len(heads), *section.rows]
            out += ["| " + " | ".join(x.replace("|", "\\|") for x in row) + " |" for row in rows]
            out.append("")
        code = [("", section.code)] * bool(section.code) + list(section.folded)
        for name, text in code:
            out += [*([f"### {name}", ""] if name else []), "```python", text, "```", ""]
    return "\n".join(out)


def as_html(title: str, sections: Sequence[Section]) -> str:
    """One file that needs no other."""
    out = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
    ]
    for section in sections:
        out.append(f"<h2>{escape(section.title)}</h2>")
        out += [f"<p>{escape(line)}</p>" for line in section.text]
        if section.rows:
            rows = [_row("th", section.heads)] * bool(section.heads)
            rows += [_row("td", row) for row in section.rows]
            out.append('<div class="wide"><table>' + "\n".join(rows) + "</table></div>")
        if section.code:
            out.append(f"<pre>{escape(section.code)}</pre>")
        for name, code in section.folded:
            shown = f"<pre>{escape(code)}</pre>"
            out.append(f"<details><summary>{escape(name)}</summary>{shown}</details>")
    return "\n".join([*out, "</body></html>\n"])


def _row(tag: str, cells: Sequence[object]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(str(x))}</{tag}>" for x in cells) + "</tr>"
