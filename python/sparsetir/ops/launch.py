"""How kernels and plans are run on tensors of torch, and which types there are kernels for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cache

import torch
import tvm_ffi
from torch import Tensor
from tvm.target import Target

from sparsetir.planning.run_plan import Plan
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.targets import resolve_target

DTYPES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float64: "float64",
}
# Vector loads of a GPU want whole vectors.
GPU_ALIGNMENT = 16


def launch(kernel: Kernel, named: Mapping[str, Tensor | float | None]) -> None:
    """Run a kernel on tensors and numbers that fit, by the names of its parameters."""
    signature = kernel.signature
    names = signature.names if kernel.computed else signature.passed
    given = {
        name: plain_tensor(x) if isinstance(x, Tensor) else x
        for name in names
        if (x := named.get(name)) is not None
    }
    device = next(x.device for x in given.values() if isinstance(x, Tensor))
    if device.type == "cpu":
        _run(kernel, given)
        return
    with _on(device):
        _run(kernel, given)


def _run(kernel: Kernel, given: Mapping[str, Tensor | float]) -> None:
    if kernel.computed:  # of index arrays, for which it is kept
        kernel(**given)
        return
    args = [*given.values()]
    try:
        kernel.run_unchecked(args)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        kernel.run_refused(args, error)


def call_plan(run: Plan, operands: Sequence[Tensor], values: Tensor | None) -> Tensor:
    """A plan on operands that fit it."""
    plain = [plain_tensor(x) for x in operands]
    values = None if values is None else plain_tensor(values)
    if plain[0].is_cpu:
        return run.run_trusted(plain, values)
    with _on(plain[0].device):
        return run.run_trusted(plain, values)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Where kernels run: there, on torch's current stream."""
    both = ExitStack()
    both.enter_context(torch.cuda.device(device))
    both.enter_context(tvm_ffi.use_torch_stream())
    return both


def plain_tensor(x: Tensor) -> Tensor:
    """As kernels take it, which read memory as it is, and know nothing of gradients."""
    if x.requires_grad:
        x = x.detach()
    if x.is_neg():
        x = x.resolve_neg()
    if x._is_zerotensor():
        x = x.clone()
    if not x.is_contiguous():
        x = x.contiguous()
    return x if x.is_cpu or x.data_ptr() % GPU_ALIGNMENT == 0 else x.clone()


def wide_tensor(x: Tensor) -> Tensor:
    """As kernels take it that compute in the type of the sums alone: float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.detach().resolve_neg().to(wide).contiguous()


@cache
def target_of(device: torch.device) -> Target:
    """What kernels are compiled for."""
    return resolve_target("cuda" if device.type == "cuda" else "llvm")
