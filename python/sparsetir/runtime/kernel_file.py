"""Kernels in files: a shared library with what describes it behind.

    library | description, as JSON | bytes of both, 16 digits each | their SHA-256 | mark

Loaders of shared libraries ignore what follows the last section. The hash shows damage, before a
loader maps a file that is cut off, which ends the process; it is no proof of who wrote the file.
What is loaded is a copy of the bytes that were checked: whoever writes into the file later, instead
of replacing it, changes no kernel that runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import tvm_ffi
from tvm.runtime import Module

from sparsetir.runtime import pool
from sparsetir.runtime.file_errors import whole

MARK = b"SPARSETIR2"
MARK_OF_ANY_VERSION = MARK[:-1]
DIGITS = 16
TRAILER = 2 * DIGITS + hashlib.sha256().digest_size + len(MARK)


# Bytes that there has to be room for: LLVM ends the process where it cannot write an object.
ROOM = 2**22
ELF, MACHINE = b"\x7fELF", slice(18, 20)


def write_library(
    module: Module, path: Path, description: dict[str, object], overwrite: bool = False
) -> None:
    """Write a compiled module and its description; the file appears when it is complete.

    Raises OSError, such as FileExistsError unless `overwrite`, and leaves what was there as it was.
    """
    text = json.dumps(description).encode()
    with whole(path, overwrite) as made:
        _export(module, made)
        with made.open("ab") as file:
            library = file.tell()
            file.write(text)
        digest = hashlib.sha256(made.read_bytes()).digest()
        with made.open("ab") as file:
            file.write(b"%016d%016d" % (library, len(text)) + digest + MARK)


def write_module(module: Module, path: Path, overwrite: bool) -> None:
    """Write a compiled module as a shared library alone; as :func:`write_library`."""
    with whole(path, overwrite) as made:
        _export(module, made)


def _export(module: Module, made: Path) -> None:
    made.write_bytes(bytes(ROOM))
    made.unlink()
    module.export_library(str(made), workspace_dir=str(made.parent))


def read_library(path: Path) -> tuple[bytes, dict[str, Any]]:
    """The library and the description that :func:`write_library` put behind it, of a whole file.

    Raises OSError, and ValueError that says in what the file differs from what was written.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TRAILER))
        trailer = file.read(TRAILER)
        mark = trailer[-len(MARK) :]
        if mark != MARK:
            other = len(mark) == len(MARK) and mark[:-1] == MARK_OF_ANY_VERSION
            raise ValueError(
                "of another version; export it again" if other else "no mark at the end"
            )
        sizes = trailer[:DIGITS], trailer[DIGITS : 2 * DIGITS]
        if len(trailer) < TRAILER or not all(number.isdigit() for number in sizes):
            raise ValueError("no sizes before the mark")
        library, text = map(int, sizes)
        if library + text + TRAILER != size:
            raise ValueError(
                f"cut off or added to: expected {library + text + TRAILER} bytes, got {size}"
            )
        file.seek(0)
        body = file.read(library + text)
    if hashlib.sha256(body).digest() != trailer[2 * DIGITS : -len(MARK)]:
        raise ValueError("its bytes have changed since it was written")
    found = json.loads(body[library:])
    if not isinstance(found, dict):
        raise ValueError(f"expected a description of it, got {type(found).__name__}")
    return body[:library], found


def open_library(library: bytes) -> object:
    """Load a shared library under a name that no other had, from bytes that nobody else writes.

    The loader takes a library that it has open under the same name for the same one. The copy is in
    memory where the system has such files: nothing may be run from some folders of temporary files.

    Raises RuntimeError and OSError for what cannot be loaded here.
    """
    if _is_foreign(library):
        raise RuntimeError("it is for another kind of processor than this one")
    with tempfile.TemporaryDirectory(prefix="sparsetir-") as folder:
        name = Path(folder) / "kernel.so"
        if sys.platform != "linux":
            name.write_bytes(library)
            return _loaded(name)
        with os.fdopen(os.memfd_create("sparsetir-kernel"), "wb") as file:
            file.write(library)
            file.flush()
            name.symlink_to(f"/proc/self/fd/{file.fileno()}")
            return _loaded(name)


def _loaded(name: Path) -> object:
    """TVM's module of a file; its own way to load one would resolve the link."""
    with pool.serving():
        return tvm_ffi.load_module(str(name))


def _is_foreign(library: bytes) -> bool:
    """Whether a library is of another architecture than Python, as far as their files tell."""
    try:
        with open(sys.executable, "rb") as file:
            own = file.read(MACHINE.stop)
    except OSError:
        return False
    elf = library.startswith(ELF) and own.startswith(ELF)
    return elf and library[MACHINE] != own[MACHINE]
