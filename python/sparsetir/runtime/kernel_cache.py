"""Kernels, and graphs of torch that call them, kept in files across processes.

A file is named by a hash of all that its kernel depends on: the program with the choices of its
schedule, the target, the machine as schedules see it, the versions of TVM and this package, and the
package's code. Loading one takes a fiftieth of the time of lowering and compiling. If a file is
damaged, or cannot be written or linked, the kernel is compiled in memory.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tvm

from sparsetir._versions import VERSIONS
from sparsetir.machine import this_machine
from sparsetir.runtime.file_errors import SCRATCH, user_path
from sparsetir.runtime.kernel import Kernel, description
from sparsetir.runtime.kernel_file import open_library, read_library, write_library
from sparsetir.runtime.load import described
from sparsetir.runtime.pipeline import Stages, compile_stages, kernel_of, name_of
from sparsetir.runtime.pool import work_of_threads
from sparsetir.runtime.signature import signature_of
from sparsetir.schedules.targets import (
    assumed_machine,
    cpu_name,
    features_needed,
    host_target,
    is_host,
    vector_registers,
)

VARIABLE = "SPARSETIR_KERNELS"
MOST_BYTES = 256 << 20  # beyond this the least recently used files are deleted
PACKAGE = Path(__file__).parents[1]
OTHERS_MAY_WRITE = 0o022
LEFT = 3600  # seconds after which an unfinished file counts as abandoned
# Held while plans and kernels compile others: TVM sets LLVM's options for the whole process.
COMPILING = threading.Lock()


def cache_folder() -> Path | None:
    """The folder that kernels are kept in, or None to keep none.

    `SPARSETIR_KERNELS` names it, or is empty to keep none; by default it is `sparsetir/kernels` in
    `XDG_CACHE_HOME` or `~/.cache`.
    """
    return user_path(VARIABLE, "kernels")


def kept_kernel(
    what: Callable[[], str], target: tvm.target.Target, stages: Callable[[], Stages],
    check: bool = False,
) -> tuple[Kernel, bool]:  # fmt: skip
    """A kernel, and whether it was compiled rather than loaded from a file.

    Parameters
    ----------
    what : callable
        Describes what its lowering depends on besides target, machine and package; "" for a kernel
        that is not kept.
    target : tvm.target.Target
        The target; kernels are kept for this machine's CPU alone.
    stages : callable
        Lowers the program.
    check : bool
        The same as for :func:`sparsetir.build`.

    Returns
    -------
    tuple of Kernel and bool
    """
    path = _path(what(), target) if is_host(target) and keeps() else None
    if path is None:
        return kernel_of(stages(), target, check=check), True
    kernel = _read(path, target, stages, check)
    if kernel is not None:
        return kernel, False
    lowered = stages()
    name, signature = name_of(lowered["III"]), signature_of(lowered)
    module: Any = compile_stages({name: lowered}, target)
    needs = features_needed(lowered.get("II scheduled"))
    meta = description(name, signature, target, needs, assumed_machine(target))
    if _write(module, path, meta):
        kernel = _read(path, target, lambda: lowered, check)
    return kernel or Kernel(module, name, signature, lowered, target, check=check), True


def keeps() -> bool:
    """Whether kernels are kept."""
    folder = cache_folder()
    return folder is not None and _is_private(folder)


def is_kept(what: str) -> bool:
    """Whether there is a file of a kernel for this machine; what : see :func:`kept_kernel`."""
    path = _path(what, host_target()) if keeps() else None
    return path is not None and path.exists()


def folder_of_graph(key: str) -> Path:
    """The folder of a compiled graph, where kernels are kept; key : torch's."""
    path = _path(f"graph {key}", host_target())
    assert path is not None
    folder = path.with_suffix(".graph")
    for file in folder.glob("*"):
        with contextlib.suppress(OSError):
            os.utime(file)
    return folder


def _path(what: str, target: tvm.target.Target) -> Path | None:
    """The file of a kernel; None for one that is not kept."""
    folder = cache_folder()
    if folder is None or not what:
        return None
    key = hashlib.sha256("\0".join([what, *_circumstances(target)]).encode())
    return folder / f"{key.hexdigest()}.so"


def _read(
    path: Path, target: tvm.target.Target, stages: Callable[[], Stages], check: bool
) -> Kernel | None:
    """The kernel in a file; None for a file that is missing or damaged."""
    try:
        library, meta = read_library(path)
        name, signature, _ = described(meta)
        kernel = Kernel(
            open_library(library), name, signature, stages, target, check=check,
            needs=meta["needs"], assumes=meta["assumes"],
            compiler=lambda stages: compile_stages({name: stages}, target),
        )  # fmt: skip
        os.utime(path)
    except Exception:  # TVM raises many types
        return None
    return kernel


def _write(module: Any, path: Path, meta: dict[str, object]) -> bool:
    """Write the file of a kernel; return whether that was possible."""
    try:
        _make_room(path.parent)
        write_library(module, path, meta, overwrite=True, link=_link)
    except (OSError, RuntimeError, subprocess.CalledProcessError):
        return False
    return True


def _link(library: str, objects: Sequence[str], *_: object, **__: object) -> None:
    """Link a library; its symbols are those of this process, and are resolved when it is loaded.

    Calls the linker itself, as a compiler takes ten times as long to call it.
    """
    command = ["ld", "-shared", "-z", "now", "-o", library, *objects]
    subprocess.run(command, check=True, capture_output=True)


@functools.cache
def _make_room(folder: Path) -> None:
    """Delete a folder's least recently used files, and unfinished ones of killed processes."""
    for scratch in folder.glob(f"{SCRATCH}*"):
        if time.time() - scratch.stat().st_mtime > LEFT:
            shutil.rmtree(scratch, ignore_errors=True)
    files = [(file.stat(), file) for file in (*folder.glob("*.so"), *folder.glob("*.graph/*"))]
    size = sum(status.st_size for status, _ in files)
    for status, file in sorted(files, key=lambda pair: pair[0].st_mtime):
        if size <= MOST_BYTES:
            return
        size -= status.st_size
        with contextlib.suppress(OSError):
            file.unlink()


@functools.lru_cache(8)
def _is_private(folder: Path) -> bool:
    """Whether a folder exists, or can be made, and nobody else can write to it: it holds code."""
    if this_machine().system != "linux":
        return False
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and not status.st_mode & OTHERS_MAY_WRITE


def _circumstances(target: tvm.target.Target) -> list[str]:
    """Texts of all else that kernels of a target depend on; the target has this CPU's features."""
    passes, machine = tvm.transform.PassContext.current(), this_machine()
    features = [] if machine.features is None else sorted(machine.features.items())
    return [
        str(target), cpu_name(target), str(vector_registers(target)), str(features),
        str(sorted(machine.caches.items())), str(assumed_machine(target)), str(work_of_threads()),
        f"{passes.opt_level} {passes.config} {passes.disabled_pass}", _package(),
    ]  # fmt: skip


@functools.cache
def _package() -> str:
    """The versions, and a hash of the package's files, which may be edited."""
    code = hashlib.sha256()
    for folder, folders, names in os.walk(PACKAGE, followlinks=True):
        folders.sort()
        for name in sorted(n for n in names if n.endswith((".py", ".ll"))):
            code.update(f"{folder.removeprefix(str(PACKAGE))}/{name}\0".encode())
            code.update(Path(folder, name).read_bytes())
    return f"{VERSIONS} {code.hexdigest()}"
