"""What kernels are compiled for."""

from __future__ import annotations

from typing import Any

import tvm

__all__ = ["DEFAULT_CUDA_ARCH", "host_target", "resolve_target"]

DEFAULT_CUDA_ARCH = "sm_80"


def host_target() -> Any:
    """This machine's CPU, by the name that LLVM gives it."""
    cpu = tvm.get_global_func("tvm.codegen.llvm.GetHostCPUName")()
    return tvm.target.Target({"kind": "llvm", "mcpu": str(cpu)})


def resolve_target(target: Any) -> Any:
    """A `tvm.target.Target`; "llvm" and "cuda" mean what this machine has."""
    if isinstance(target, tvm.target.Target):
        return target
    if target == "llvm":
        return host_target()
    if target == "cuda":
        device = tvm.runtime.device("cuda", 0)
        arch = f"sm_{device.compute_version.replace('.', '')}" if device.exist else None
        return tvm.target.Target({"kind": "cuda", "arch": arch or DEFAULT_CUDA_ARCH})
    if not isinstance(target, str | dict):
        raise TypeError(
            "build: argument 'target': expected 'llvm', 'cuda', a target dict or a Target, "
            f"got {target!r}"
        )
    try:
        return tvm.target.Target(target)
    except (ValueError, TypeError) as error:
        raise ValueError(f"build: argument 'target': {error}") from error
