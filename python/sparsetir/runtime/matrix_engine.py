"""What kernels need of a CPU beyond instructions: the system's leave to use its matrix engine."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from sparsetir.runtime.targets import cpu_features, host_features
from sparsetir.schedules.passes.amx_nests import NEEDS

ARCH_PRCTL = 158  # of x86-64
REQUEST_PERMISSION, TILE_DATA = 0x1023, 18


def features_needed(func: Any) -> list[str]:
    """The features that a function of stage II asks for by intrinsics, as LLVM names them."""
    attrs = getattr(func, "attrs", None) or {}
    return [str(name) for name in attrs.get(NEEDS, [])]


def missing_of(needed: Sequence[str], target: Any) -> list[str]:
    """Those of some features that a CPU target has not."""
    return [name for name in needed if name not in cpu_features(target)] if needed else []


@cache
def _tiles_refused() -> str:
    """Ask the system, once for this process and the threads it will have; why not, or nothing.

    A process that uses tiles without leave is ended. Asking enlarges what signal handlers are
    given, so it is done when the first kernel that needs it is made.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "this is not Linux on x86-64, where it is known how to ask"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0:
        return ""
    return os.strerror(ctypes.get_errno())


def allowed(needed: Sequence[str]) -> str:
    """Why this process cannot run a kernel that needs some features; nothing where it can.

    Asks the system for tiles where they are needed and there.
    """
    has = host_features()
    lacks = [name for name in needed if not has.get(name, False)]
    if lacks:
        return f"it needs a CPU with {' and '.join(lacks)}, which this one has not"
    refused = _tiles_refused() if "amx-tile" in needed else ""
    return f"the system gives this process no tiles: {refused}" if refused else ""


def refusing(name: str, reason: str) -> Callable[..., None]:
    """A function that raises, in place of one that cannot run here."""

    def run(*_: Any) -> None:
        raise RuntimeError(f"{name}: {reason}")

    return run
