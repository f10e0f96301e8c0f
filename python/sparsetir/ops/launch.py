"""How kernels and plans are run on tensors of torch, and which types there are kernels for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
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
    given = {n: plain_tensor(x) if isinstance(x, Tensor) else x for n, x in named.items()}
    device = next(x.device for x in given.values() if isinstance(x, Tensor))
    with _on(device):
        if kernel.computed:  # of index arrays, for which it is kept
            names = kernel.signature.names
            kernel(**{n: x for n, x in given.items() if n in names and x is not None})
            return
        args = [given[name] for name in kernel.signature.passed]
        try:
            kernel.run_unchecked(args)
        except (TypeError, ValueError, BufferError, RuntimeError) as error:
            kernel.run_refused(args, error)


def call_plan(run: Plan, operands: Sequence[Tensor], values: Tensor | None) -> Tensor:
    """A plan on operands that fit it."""
    plain = [plain_tensor(x) for x in operands]
    with _on(plain[0].device):
        return run.run_trusted(plain, None if values is None else plain_tensor(values))


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Where kernels run: there, on torch's current stream."""
    if device.type == "cpu":
        return nullcontext()
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
    aligned = x.device.type == "cpu" or x.data_ptr() % GPU_ALIGNMENT == 0
    return x if aligned else x.clone()


def wide_tensor(x: Tensor) -> Tensor:
    """As kernels take it that compute in the type of the sums alone: float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.detach().resolve_neg().to(wide).contiguous()


@cache
def target_of(device: torch.device) -> Target:
    """What kernels are compiled for."""
    return resolve_target("cuda" if device.type == "cuda" else "llvm")
