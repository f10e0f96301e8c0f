"""Colours of programs on a terminal."""

from __future__ import annotations

import os
import sys
from importlib import import_module

# Lexers of pygments, by the kind of a stage's text.
LEXERS = {"source": "LlvmLexer", "cuda": "CudaLexer", "asm": "GasLexer"}


def coloured(text: str, kind: str = "") -> str:
    """Colour a text if it is printed on a terminal that supports it.

    kind : "source", "cuda" or "asm"; Python otherwise
    """
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    try:
        pygments = import_module("pygments")
        lexer = getattr(import_module("pygments.lexers"), LEXERS.get(kind, "PythonLexer"))()
        formatter = import_module("pygments.formatters").TerminalFormatter()
    except (ImportError, AttributeError):  # pygments is optional
        return text
    return pygments.highlight(text, lexer, formatter).rstrip("\n")
