"""Kernels in files: a shared library with what describes it behind.

Behind the library come its description as JSON, the length of that text in 16 digits, and a mark.
Loaders of shared libraries ignore what follows the last section.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import tvm_ffi

__all__ = ["open_library", "read_description", "write_library"]

MARK = b"SPARSETIR1"


def write_library(module: Any, path: Path, description: dict[str, Any]) -> None:
    """Write a compiled module and its description; an existing file is replaced at once."""
    text = json.dumps(description).encode()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".sparsetir-") as folder:
        made = Path(folder) / path.name
        module.export_library(str(made))
        with made.open("ab") as file:
            file.write(text + f"{len(text):016d}".encode() + MARK)
        os.replace(made, path)


def read_description(path: Path) -> dict[str, Any]:
    """What :func:`write_library` put behind the library; raises for other files."""
    data = path.read_bytes()
    text, mark = data[: -len(MARK)], data[-len(MARK) :]
    if mark != MARK:
        raise ValueError("no mark at the end")
    size = int(text[-16:])
    return json.loads(text[-16 - size : -16])


def open_library(path: Path) -> Any:
    """Load a shared library under a name that no other had.

    The loader takes a library that it has open under the same name for the same one, even where the
    file was replaced since.
    """
    with tempfile.TemporaryDirectory(prefix="sparsetir-") as folder:
        link = Path(folder) / "kernel.so"
        link.symlink_to(path)
        return tvm_ffi.load_module(str(link))  # tvm.runtime.load_module would resolve the link
