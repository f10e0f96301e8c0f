"""Kernels that are compiled once in a process, and serve all patterns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

from sparsetir.build import kernel_of
from sparsetir.kernel import Kernel
from sparsetir.lower import Stages

__all__ = ["compilations", "compiled"]

_kernels: dict[Any, Kernel] = {}
# For two threads that want the same kernel.
_compiling = threading.Lock()


def compilations() -> int:
    """How many kernels plans and operators have compiled in this process."""
    return len(_kernels)


def compiled(key: Hashable, target: Any, stages: Callable[[], Stages]) -> Kernel:
    """The kernel for a key and a `tvm.target.Target`, compiled when it is first wanted.

    stages : gives what is compiled; the kernel trusts its index arrays
    """
    key = (key, str(target))
    with _compiling:
        if key not in _kernels:
            _kernels[key] = kernel_of(stages(), target, check=False)
        return _kernels[key]
