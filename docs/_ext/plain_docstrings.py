"""Docstrings are plain text with numpydoc's sections, which napoleon reads.

What reStructuredText would take for marks, such as the stars of a product, is protected here
before; text in backticks, roles, literal blocks and examples are marks, and stay.
"""

import re
from typing import Any

# What stays as it is: text in backticks, with its role if any.
CODE = re.compile(r"(:\w+(?::\w+)?:`[^`]*`|``[^`]*``|`[^`]*`)")
ARGUMENTS = re.compile(r"\*{1,2}[a-z]")  # *names, which napoleon protects


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", process, priority=100)  # before napoleon's 500
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True}


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Change the lines of a docstring in place."""
    lines[:] = protected(lines)


def skip(app: Any, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """Leave out fields of named tuples, which their class describes."""
    alias = (getattr(obj, "__doc__", None) or "").startswith("Alias for field number")
    return True if alias else None


def protected(lines: list[str]) -> list[str]:
    """The lines, with backslashes before characters that are no marks."""
    out: list[str] = []
    literal: int | None = None  # indentation of the line before an indented block
    example = False
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if line.strip():
            if literal is not None and indent <= literal:
                literal = None
            example = line.lstrip().startswith(">>>") or example
        else:
            example = False
        marks = literal is not None or example or ARGUMENTS.match(line)
        out.append(line if marks else _protected(line))
        if literal is None and line.endswith("::"):
            literal = indent
    return out


def _protected(text: str) -> str:
    parts = CODE.split(text)
    for n in range(0, len(parts), 2):
        parts[n] = re.sub(r"([*|\\])", r"\\\1", parts[n])
        parts[n] = re.sub(r"(?<=\w)_(?!\w)", r"\\_", parts[n])
    return "".join(parts)
