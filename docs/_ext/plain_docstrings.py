"""Docstrings as this project writes them, with the sections that numpydoc has.

A docstring is a summary, lines `name : what it is` with more of it indented, and prose that says
what is returned (`Returns ...` or `Gives ...`) and raised (`Raises ...`). This makes fields of
these, and protects characters in prose that reStructuredText takes for marks.
"""

import re
from typing import Any

PARAMETER = re.compile(r"^(\*{0,2}[A-Za-z_]\w*(?:, \*{0,2}[A-Za-z_]\w*)*) : (.*)$")
OUTCOME = re.compile(r"^(Returns|Gives|Raises|Yields) ")
SENTENCE = re.compile(r"(?<=[.)]) +(?=Raises )")
# What stays as it is: text in backticks, with its role if any, and links.
CODE = re.compile(r"(:\w+(?::\w+)?:`[^`]*`|``[^`]*``|`[^`]*`)")


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", process)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True}


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Change the lines of a docstring in place."""
    lines[:] = converted(lines)


def skip(app: Any, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """Leave out fields of named tuples, which their class describes."""
    alias = (getattr(obj, "__doc__", None) or "").startswith("Alias for field number")
    return True if alias else None


def converted(lines: list[str]) -> list[str]:
    """The docstring in reStructuredText, with fields for parameters, results and errors."""
    body: list[str] = []
    fields: list[str] = []
    literal = False  # inside of an indented block behind "::"
    described = False  # behind parameters
    for block in _blocks(lines):
        if literal and block[0][:1].isspace():
            body += [*block, ""]
            continue
        literal = block[-1].endswith("::")
        described = described and block[0].startswith(" ")
        if block[0].startswith(">>>"):
            body += [*block, ""]
        elif all(line.startswith("    ") for line in block):
            if described:  # more of a parameter
                fields += ["", *(_escaped(line) for line in block), ""]
            else:  # code, by itself
                body += ["::", "", *block, ""]
        elif PARAMETER.match(block[0]):
            fields += _parameters(block)
            described = True
        elif OUTCOME.match(block[0]) and not literal:
            fields += _outcomes(" ".join(line.strip() for line in block))
        else:
            body += [*_prose(block), ""]
    return [*body, *fields, ""]


def _blocks(lines: list[str]) -> list[list[str]]:
    """Paragraphs; prose that follows parameters without an empty line is one of its own."""
    out: list[list[str]] = [[]]
    for line in lines:
        plain = not line.startswith(" ") and not PARAMETER.match(line)
        if out[-1] and (not line.strip() or plain and PARAMETER.match(out[-1][0])):
            out.append([])
        if line.strip():
            out[-1].append(line)
    return [block for block in out if block]


def _parameters(block: list[str]) -> list[str]:
    out = []
    for line in block:
        found = PARAMETER.match(line)
        if found:
            names = found[1].replace(", ", ",")  # a space would make the first a type
            out.append(f":param {_escaped(names)}: {_escaped(found[2])}")
        else:
            out.append(f"    {_escaped(line.strip())}")
    return out


def _outcomes(text: str) -> list[str]:
    """Fields of a paragraph; sentences that begin with "Raises" have one of their own."""
    out = []
    for part in SENTENCE.split(text):
        word, rest = part.split(" ", 1)
        if word in ("Returns", "Gives", "Yields"):
            out.append(f":returns: {_escaped(rest)}")
        else:
            out.append(f":errors: {_escaped(part)}")
    return out


def _prose(block: list[str]) -> list[str]:
    """A paragraph, a list, or lines with others indented below them (as definitions are)."""
    return [_escaped(line) for line in block]


def _escaped(text: str) -> str:
    parts = CODE.split(text)
    for n in range(0, len(parts), 2):
        parts[n] = re.sub(r"([*|\\])", r"\\\1", parts[n])
        parts[n] = re.sub(r"(?<=\w)_(?!\w)", r"\\_", parts[n])
    return "".join(parts)
