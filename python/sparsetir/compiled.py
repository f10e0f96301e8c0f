"""Kernels that are compiled once in a process, and serve all patterns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

from sparsetir.build import build
from sparsetir.kernel import Kernel

__all__ = ["compilations", "compiled"]

_kernels: dict[Any, Kernel] = {}
# For two threads that want the same kernel.
_compiling = threading.Lock()


def compilations() -> int:
    """How many kernels plans and operators have compiled in this process."""
    return len(_kernels)


def compiled(key: Hashable, target: Any, scheduled: Callable[[], Any]) -> Kernel:
    """The kernel for a key and a `tvm.target.Target`, compiled when it is first wanted.

    scheduled : gives the scheduled stage-II function, whose index arrays are trusted
    """
    key = (key, str(target))
    with _compiling:
        if key not in _kernels:
            _kernels[key] = build(scheduled(), target, check=False)
        return _kernels[key]
