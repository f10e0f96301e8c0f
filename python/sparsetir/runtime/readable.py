"""Whether the memory of an array holds its numbers, and what torch is to know of a call.

Kernels read and write memory as it is. All entrances ask here: kernels, plans, sparse matrices.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from sparsetir.runtime import pool

# Of torch's dispatch keys those of tensors that stand for others.
STANDING = ("Python", "FuncTorchGradWrapper", "FuncTorchBatched", "Functionalize")
NONE: Mapping[int, str] = {}
# Whose memory holds their numbers. To ask whether something is torch's takes half a microsecond.
PLAIN = frozenset((np.ndarray, tvm.runtime.Tensor, tvm_ffi.Tensor))


class _Torch:
    """What calls need of torch, looked up once: a call takes a few microseconds."""

    def __init__(self, torch: Any) -> None:
        self.tensor = torch.Tensor
        self.recording = torch.is_grad_enabled
        self.forward = torch.autograd.forward_ad
        self.increment = torch.autograd.graph.increment_version


_torch: _Torch | None = None


def _loaded_torch() -> _Torch | None:
    """None where nothing has imported torch, so that no array is its."""
    global _torch
    if _torch is None:
        module = sys.modules.get("torch")
        if hasattr(module, "autograd"):  # not while it is being imported
            _torch = _Torch(module)
            pool.meet_torch()
    return _torch


def check_memory(
    who: str,
    names: Sequence[str],
    arrays: Sequence[Any],
    without_gradient: Mapping[int, str] = NONE,
) -> bool:
    """Raise TypeError for an array whose memory does not hold its numbers, as far as it is seen.

    Others of these have no memory at all, which fails later; :func:`hidden` tells all of them.

    without_gradient : by position, why an argument may not require a gradient while torch records
        them (ValueError)

    Gives True where all of them are seen to be plain tensors of torch.
    """
    torch = _torch or _loaded_torch()
    if torch is not None:  # plain tensors in a fraction of a microsecond
        tensor = torch.tensor
        for array in arrays:
            if type(array) is not tensor or array.is_neg():
                break
        else:
            for at in without_gradient:
                if arrays[at].requires_grad:
                    break
            else:
                if torch.forward._current_level < 0:
                    return True
    _check_each(torch, who, names, arrays, without_gradient)
    return False


def _check_each(
    torch: _Torch | None,
    who: str,
    names: Sequence[str],
    arrays: Sequence[Any],
    without_gradient: Mapping[int, str],
) -> None:
    for at, (name, array) in enumerate(zip(names, arrays, strict=True)):
        if type(array) in PLAIN:
            continue
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(f"{who}: argument '{name}': expected {hidden(array)}")
        if torch is None or not isinstance(array, torch.tensor):
            continue
        if array.is_neg():
            raise TypeError(f"{who}: argument '{name}': expected {hidden(array)}")
        if at in without_gradient and _has_gradient(torch, array):
            raise ValueError(f"{who}: argument '{name}': {without_gradient[at]}")


def _has_gradient(torch: _Torch, tensor: Any) -> bool:
    """Whether derivatives of what is made of a tensor are recorded, backward or forward."""
    if tensor.requires_grad and torch.recording():
        return True
    return torch.forward._current_level >= 0 and torch.forward.unpack_dual(tensor)[1] is not None


def hidden(array: Any) -> str:
    """What is expected instead of an array whose memory does not hold its numbers; "" for others.

    Such as "an array without a mask, got a masked one; give `array.filled(...)`".
    """
    if isinstance(array, np.ma.MaskedArray):
        return "an array without a mask, got a masked one; give `array.filled(...)`"
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(array, torch.Tensor):
        return ""
    if array._is_zerotensor():
        return "a tensor with memory, got torch._efficientzerotensor; give `tensor.clone()`"
    if array.is_neg():
        return "a tensor without the negative bit; give `tensor.resolve_neg()`"
    if array.is_conj():
        return "a tensor without the conjugate bit; give `tensor.resolve_conj()`"
    if array.is_nested:
        return "a dense tensor, got a nested one"
    keys = torch._C._dispatch_keys(array)
    standing = (getattr(torch._C.DispatchKey, name, None) for name in STANDING)
    if any(key is not None and keys.has(key) for key in standing):
        return (
            f"a tensor with memory of its own, got {type(array).__name__} that stands for another, "
            "as in torch.func and in traces"
        )
    in_memory = array.layout is torch.strided and array.device.type == "cpu"
    if in_memory and array.numel() and not array.data_ptr():
        return "a tensor with memory, got one whose storage was let go of"
    return ""


def count_writes(arrays: Iterable[object]) -> None:
    """Let torch know that tensors were written, as its own operators do.

    A backward pass that needs what was there before then fails, instead of using what is there now.
    """
    torch = _loaded_torch()
    if torch is None:
        return
    for array in arrays:
        if type(array) not in PLAIN and isinstance(array, torch.tensor):
            torch.increment(array)
