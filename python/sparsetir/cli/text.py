"""Colours of programs on a terminal."""

from __future__ import annotations

import os
import sys
from importlib import import_module

# Of pygments, by what a stage is.
LEXERS = {"source": "LlvmLexer", "cuda": "CudaLexer", "asm": "GasLexer"}


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
