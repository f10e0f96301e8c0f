"""Kernels in files: a shared library followed by its description.

    library | description, as JSON | bytes of both, 16 digits each | their SHA-256 | mark

Loaders of shared libraries ignore bytes after the last section. The hash reveals damage before a
loader maps a truncated file, which would end the process; it does not authenticate the file. The
bytes that were checked are copied and loaded from the copy: later writes into the file, rather than
replacing it, do not change running kernels.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tvm_ffi
from tvm.runtime import Module

from sparsetir.machine import this_machine
from sparsetir.runtime import pool
from sparsetir.runtime.file_errors import whole

Linker = Callable[..., object]  # (path of the library, paths of object files)
MARK = b"SPARSETIR2"
MARK_OF_ANY_VERSION = MARK[:-1]
DIGITS = 16
TRAILER = 2 * DIGITS + hashlib.sha256().digest_size + len(MARK)


# Bytes that must be free on disk: LLVM ends the process if it cannot write an object file.
ROOM = 2**22
ELF, MACHINE = b"\x7fELF", slice(18, 20)


def write_library(
    module: Module,
    path: Path,
    description: dict[str, object],
    overwrite: bool = False,
    link: Linker | None = None,
) -> None:
    """Write a compiled module and its description; the file appears when it is complete.

    link : makes a shared library from object files; by default a C++ compiler

    Raises OSError, such as FileExistsError unless `overwrite`, and then changes nothing.
    """
    text = json.dumps(description).encode()
    with whole(path, overwrite) as temporary:
        _export(module, temporary, link)
        with temporary.open("ab") as file:
            library = file.tell()
            file.write(text)
        digest = hashlib.sha256(temporary.read_bytes()).digest()
        with temporary.open("ab") as file:
            file.write(b"%016d%016d" % (library, len(text)) + digest + MARK)


def write_module(module: Module, path: Path, overwrite: bool) -> None:
    """Write a compiled module as a shared library alone; see :func:`write_library`."""
    with whole(path, overwrite) as temporary:
        _export(module, temporary)


def _export(module: Module, path: Path, link: Linker | None = None) -> None:
    path.write_bytes(bytes(ROOM))
    path.unlink()
    module.export_library(str(path), workspace_dir=str(path.parent), fcompile=link)


def read_library(path: Path) -> tuple[bytes, dict[str, Any]]:
    """Read a library and its description from a file of :func:`write_library`, and check it.

    Raises OSError, and ValueError that describes how the file is damaged.
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
    description = json.loads(body[library:])
    if not isinstance(description, dict):
        raise ValueError(f"expected a description of it, got {type(description).__name__}")
    return body[:library], description


def open_library(library: bytes) -> object:
    """Load a shared library from its bytes under a unique name.

    The loader identifies libraries by name, and would return one that is open already. The copy is
    in memory if the system supports it, as some temporary folders are mounted noexec.

    Raises RuntimeError and OSError if it cannot be loaded here.
    """
    if _is_foreign(library):
        raise RuntimeError("it is for another kind of processor than this one")
    with tempfile.TemporaryDirectory(prefix="sparsetir-") as folder:
        name = Path(folder) / "kernel.so"
        if this_machine().system != "linux":
            name.write_bytes(library)
            return _loaded(name)
        with os.fdopen(os.memfd_create("sparsetir-kernel"), "wb") as file:
            file.write(library)
            file.flush()
            name.symlink_to(f"/proc/self/fd/{file.fileno()}")
            return _loaded(name)


def _loaded(name: Path) -> object:
    """TVM's module of a file; TVM's usual loader would resolve the link."""
    with pool.serving():
        return tvm_ffi.load_module(str(name))


def _is_foreign(library: bytes) -> bool:
    """Whether a library is for another architecture than this process, by their ELF headers."""
    try:
        with open("/proc/self/exe", "rb") as file:
            process = file.read(MACHINE.stop)
    except OSError:
        return False
    elf = library.startswith(ELF) and process.startswith(ELF)
    return elf and library[MACHINE] != process[MACHINE]
