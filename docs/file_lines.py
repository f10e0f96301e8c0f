"""First sentences of the package's files: a list for the map, and for the command line.

`python docs/file_lines.py [folder]` prints those of one folder, or all.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "python" / "sparsetir"


def folders() -> list[str]:
    """Folders of the package that hold modules; the package itself is "."."""
    walked = os.walk(PACKAGE, followlinks=True)
    return sorted(
        os.path.relpath(folder, PACKAGE)
        for folder, _, files in walked
        if any(name.endswith(".py") for name in files)
    )


def first_sentences(folder: str) -> dict[str, str]:
    """First sentences of the modules in a folder, by the files' names."""
    sentences = {}
    for file in sorted((PACKAGE / folder).glob("*.py")):
        text = " ".join((ast.get_docstring(ast.parse(file.read_text())) or "").split())
        if text:
            sentence = re.split(r"(?<=\.)\s", text)[0].removesuffix("::")
            sentences[file.name] = re.sub(r":\w+:(?=`)", "", sentence)
    return sentences


def listed(folder: str) -> str:
    """Return a list in Markdown of the files of a folder."""
    return "\n".join(
        f"- `{name}`: {text}"
        for name, text in first_sentences(folder).items()
        if name != "__init__.py"
    )


if __name__ == "__main__":
    for folder in sys.argv[1:] or folders():
        print(f"{folder}/\n\n{listed(folder)}\n")
