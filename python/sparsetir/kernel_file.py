"""Kernels in files: a shared library with what describes it behind.

    library | description, as JSON | bytes of both, 16 digits each | their SHA-256 | mark

Loaders of shared libraries ignore what follows the last section. The hash shows damage, before a
loader maps a file that is cut off, which ends the process; it is no proof of who wrote the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import tvm_ffi

__all__ = ["open_library", "read_description", "write_library"]

MARK = b"SPARSETIR2"
MARK_OF_ANY_VERSION = MARK[:-1]
DIGITS = 16
TRAILER = 2 * DIGITS + hashlib.sha256().digest_size + len(MARK)


def write_library(module: Any, path: Path, description: dict[str, Any]) -> None:
    """Write a compiled module and its description; an existing file is replaced at once."""
    text = json.dumps(description).encode()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".sparsetir-") as folder:
        made = Path(folder) / path.name
        module.export_library(str(made))
        with made.open("ab") as file:
            library = file.tell()
            file.write(text)
        digest = hashlib.sha256(made.read_bytes()).digest()
        with made.open("ab") as file:
            file.write(b"%016d%016d" % (library, len(text)) + digest + MARK)
        os.replace(made, path)


def read_description(path: Path) -> dict[str, Any]:
    """What :func:`write_library` put behind the library, of a file that is whole.

    Raises OSError, and ValueError that says in what the file differs from what was written.
    """
    data = path.read_bytes()
    mark = data[-len(MARK) :]
    if mark != MARK:
        other = len(mark) == len(MARK) and mark[:-1] == MARK_OF_ANY_VERSION
        raise ValueError("of another version; export it again" if other else "no mark at the end")
    trailer = data[-TRAILER:]
    sizes = trailer[:DIGITS], trailer[DIGITS : 2 * DIGITS]
    if len(trailer) < TRAILER or not all(size.isdigit() for size in sizes):
        raise ValueError("no sizes before the mark")
    library, text = map(int, sizes)
    if library + text + TRAILER != len(data):
        raise ValueError(
            f"cut off or added to: expected {library + text + TRAILER} bytes, got {len(data)}"
        )
    body = data[:-TRAILER]
    if hashlib.sha256(body).digest() != trailer[2 * DIGITS : -len(MARK)]:
        raise ValueError("its bytes have changed since it was written")
    found = json.loads(body[library:])
    if not isinstance(found, dict):
        raise ValueError(f"expected a description of it, got {type(found).__name__}")
    return found


def open_library(path: Path) -> Any:
    """Load a shared library under a name that no other had.

    The loader takes a library that it has open under the same name for the same one, even where the
    file was replaced since.
    """
    with tempfile.TemporaryDirectory(prefix="sparsetir-") as folder:
        link = Path(folder) / "kernel.so"
        link.symlink_to(path)
        return tvm_ffi.load_module(str(link))  # tvm.runtime.load_module would resolve the link
