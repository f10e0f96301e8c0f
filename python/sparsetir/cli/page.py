"""A page of texts, tables and code: for a terminal, as Markdown, as an HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from sparsetir.cli.text import coloured, fitted

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


def _row(tag: str, cells: Sequence[Any]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(str(x))}</{tag}>" for x in cells) + "</tr>"
