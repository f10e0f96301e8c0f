"""Formatting of amounts, tables and programs, and of pages as text, Markdown and HTML."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvm import tirx

    from sparsetir.sparse_ir.nodes import SparseFunc

WIDTH = 100  # of tables and signatures, in characters
LEAST = 24  # of the last column of a table
STYLE = """
:root{color-scheme:light dark}
body{max-width:1060px;margin:0 auto;padding:1rem;line-height:1.5;
font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1{font-size:1.35rem;overflow-wrap:anywhere}h2{font-size:1.05rem;margin-top:2rem}
pre,.wide{overflow-x:auto}
pre{font-size:.85rem;padding:.6rem;border:1px solid #8886;border-radius:6px}
img{display:block;width:100%;height:auto;background:#fff;border-radius:6px}
table{border-collapse:collapse;font-size:.9rem}
th,td{text-align:left;vertical-align:top;padding:.3rem .8rem .3rem 0;border-bottom:1px solid #8886}
td:last-child{min-width:16em}
summary{cursor:pointer}
"""


def many(count: int, one: str, several: str = "") -> str:
    """A count with its noun, as "2 records"; several : an irregular plural."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def memory(size: float | None) -> str:
    """Format bytes to about three digits."""
    if size is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def micros(seconds: float | None) -> str:
    """Format the time of a call to three digits: µs below 10 ms, then ms, then s."""
    if not seconds:
        return "-"
    value, unit = seconds, "s"
    if seconds < 10e-3:
        value, unit = seconds * 1e6, "µs"
    elif seconds < 10:
        value, unit = seconds * 1e3, "ms"
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"


def duration(seconds: float) -> str:
    """Format a span of time in s, min or h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def fitted(line: str, indent: int) -> str:
    """Wrap a line of a table that is too long."""
    return textwrap.fill(
        line, WIDTH, drop_whitespace=True, subsequent_indent=" " * indent, break_long_words=False
    )


def aligned(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[str]:
    """Lines of a table, whose last column is wrapped if it is too long.

    right : align columns between the first and the last to the right
    """
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    lines = []
    for row in rows:
        cells = [
            x.rjust(w) if right and n else x.ljust(w)
            for n, (x, w) in enumerate(zip(row, widths, strict=False))
        ]
        start = "".join(f"{cell}  " for cell in cells)
        parts = textwrap.wrap(row[-1], max(LEAST, WIDTH - len(start)), break_long_words=False)
        lines.append((start + "".join(parts[:1])).rstrip())
        lines += [" " * len(start) + part for part in parts[1:]]
    return lines


@dataclass(frozen=True)
class Section:
    """A heading with optional paragraphs, table, code and picture.

    rows : rows of the table, without `heads`
    folded : (title, code) that an HTML page shows on demand, and a terminal only if asked
    picture : an element of HTML
    """

    title: str
    text: Sequence[str] = ()
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()
    code: str = ""
    folded: Sequence[tuple[str, str]] = field(default=())
    picture: str = ""

    @property
    def table(self) -> list[list[str]]:
        """The rows as texts, heads first."""
        return [[str(x) for x in row] for row in ([self.heads] * bool(self.heads) + [*self.rows])]


def readable(func: tirx.PrimFunc | SparseFunc) -> str:
    """The text of a function of any stage.

    A PrimFunc is shown without the attributes that only our passes read, with one parameter per
    line if they do not fit one line, and without the quotes that TVM's printer adds to sizes.
    """
    from tvm import tirx  # after `import sparsetir`, as this module serves without TVM, too

    if isinstance(func, tirx.PrimFunc) and func.attrs is not None:
        for name in [str(name) for name in func.attrs.keys()]:
            func = func.without_attr(name) if name.startswith("sparsetir.") else func
    lines = func.script().rstrip("\n").splitlines()
    lines = [line for line in lines if not line.startswith("# Metadata omitted")]
    return "\n".join(map(_signature, lines)).rstrip("\n")


def _signature(line: str) -> str:
    """Format the line of a `def`; a long one with one parameter per line."""
    match = re.fullmatch(r"(\s*def \w+\()(.*)(\).*:)", line)
    if match is None:
        return line
    begin, inside, end = match.groups()
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


def as_text(
    title: str, sections: Sequence[Section], *, folded: bool, coloured: Callable[[str], str] = str
) -> str:
    """Sections as lines of text.

    folded : whether to include what a page shows on demand
    coloured : adds a terminal's colours to code
    """
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


def as_markdown(title: str, sections: Sequence[Section]) -> str:
    """A Markdown page, with pipe tables and fenced code."""
    out = [f"# {title}", ""]
    for section in sections:
        out += [f"## {section.title}", ""]
        out += [part for line in section.text for part in (line, "")]
        if section.rows:
            rows = section.table if section.heads else [[""] * len(section.rows[0]), *section.table]
            rows.insert(1, ["---"] * len(rows[0]))
            out += ["| " + " | ".join(x.replace("|", "\\|") for x in row) + " |" for row in rows]
            out.append("")
        code = [("", section.code)] * bool(section.code) + list(section.folded)
        for name, text in code:
            out += [*([f"### {name}", ""] if name else []), "```python", text, "```", ""]
    return "\n".join(out)


def as_html(title: str, sections: Sequence[Section]) -> str:
    """A self-contained HTML page."""
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
            tags = ["th"] * bool(section.heads) + ["td"] * len(section.rows)
            rows = map(_row, tags, section.table)
            out.append('<div class="wide"><table>' + "\n".join(rows) + "</table></div>")
        out.append(section.picture)
        if section.code:
            out.append(f"<pre>{escape(section.code)}</pre>")
        for name, code in section.folded:
            shown = f"<pre>{escape(code)}</pre>"
            out.append(f"<details><summary>{escape(name)}</summary>{shown}</details>")
    return "\n".join([*filter(None, out), "</body></html>\n"])


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(x)}</{tag}>" for x in cells) + "</tr>"
