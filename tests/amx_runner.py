"""Run kernels for the CPU's matrix engine on any CPU: tiles are emulated, by `amx/tiles.cpp`.

A pass over stage III calls the emulator's functions in place of the instructions, or of those in
LLVM's text; all else is compiled for this machine's CPU.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tvm
from tvm import ir, tirx

from compile_cache import FOLDER
from sparsetir.runtime.pipeline import Stages, kernel_of
from sparsetir.schedules.passes.tile_nests import NEEDS
from sparsetir.schedules.targets import host_target
from sparsetir.sparse_ir.traversal import map_expr

SOURCE = Path(__file__).parent / "amx" / "tiles.cpp"
COMPILER = ("g++", "-std=c++17", "-O2", "-ffp-contract=off", "-w", "-fPIC", "-shared")
requires_compiler = pytest.mark.skipif(shutil.which(COMPILER[0]) is None, reason="no g++")
COUNTS = ("configurations", "releases", "products", "stores")


class TileError(AssertionError):
    """A kernel used tiles in a way that a CPU refuses."""


def _library() -> Path:
    """The emulator, compiled once for all processes."""
    digest = hashlib.sha256(SOURCE.read_bytes() + " ".join(COMPILER).encode()).hexdigest()[:32]
    library = FOLDER / f"tiles{digest}.so"
    if library.exists():
        os.utime(library)
        return library
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        subprocess.run([*COMPILER, "-o", f"{folder}/made.so", str(SOURCE)], check=True)
        os.replace(f"{folder}/made.so", library)
    return library


@functools.cache
def _emulator() -> ctypes.CDLL:
    library = ctypes.CDLL(
        str(_library()), mode=ctypes.RTLD_GLOBAL
    )  # where kernels find its functions
    library.tiles_error.restype = ctypes.c_char_p
    library.tiles_counts.restype = ctypes.POINTER(ctypes.c_int64)
    return library


def emulated(stages: Stages) -> Stages:
    """The stages of a kernel whose tile instructions are calls of the emulator."""
    name_of = tvm.get_global_func("target.llvm_get_intrinsic_name")

    def call(node: Any) -> Any:
        if getattr(node.op, "name", "") != "tirx.call_llvm_intrin":
            return node
        name = str(name_of(int(node.args[0])))
        if not name.startswith("llvm.x86.t") and name != "llvm.x86.ldtilecfg":
            return node
        return tirx.call_extern("int32", f"tiles_{name.split('.')[-1]}", *node.args[1:])

    def imported(node: Any) -> Any:
        if node.attr_key != "pragma_import_llvm":
            return node
        text = node.value.value.replace("bfloat", "i16")
        text = text.replace("llvm.aarch64.neon.", "tiles_").replace("smmla.v4i32.v16i8", "smmla")
        return tirx.AttrStmt(node.node, node.attr_key, ir.StringImm(text), node.body)

    func = stages["III"]
    rules = [(ir.Call, call), (tirx.AttrStmt, imported)]
    func = func.with_body(map_expr(func.body, rules))
    scheduled = stages["II scheduled"].without_attr(NEEDS)
    return {**stages, "II scheduled": scheduled, "III": func}


class EmulatedKernel:
    """A kernel of stages that were lowered for a CPU with tiles; runs here.

    counts : of the last call, configurations, releases, products and stores
    """

    def __init__(self, stages: Stages) -> None:
        _emulator()
        self.kernel = kernel_of(emulated(stages), host_target())
        self.counts: dict[str, int] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run it; raises TileError."""
        self._watched(lambda: self.kernel(*args, **kwargs))

    def run(self, values: Sequence[Any]) -> None:
        """Like :meth:`sparsetir.runtime.kernel.Kernel.run_unchecked`; raises TileError."""
        self._watched(lambda: self.kernel.run_unchecked(values))

    def _watched(self, call: Callable[[], None]) -> None:
        library = _emulator()
        library.tiles_reset()
        call()
        self.counts = dict(zip(COUNTS, library.tiles_counts()[: len(COUNTS)], strict=True))
        error = library.tiles_error().decode()
        if error:
            raise TileError(error)
