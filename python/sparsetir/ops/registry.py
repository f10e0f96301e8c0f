"""How operators are made known to torch: autograd, torch.compile, torch.export and autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from sparsetir.ops.structure import compiled_code

__all__ = ["LIBRARY", "Operator", "define", "is_plain", "save_inputs", "saved_inputs"]

# Kept, as its end would take the operators with it.
LIBRARY = torch.library.Library("sparsetir", "DEF")
AUTOCAST = (torch.float32, torch.float16, torch.bfloat16)
DEVICES = ("cpu", "cuda")


class Operator:
    """An operator `torch.ops.sparsetir.NAME`; call it with all arguments in order.

    Calls go to torch's dispatcher where it is needed: under torch.compile and torch.export, for
    autocast and for whatever else watches or changes what operators do. Elsewhere they do not: the
    dispatcher's way through Python takes longer than a small kernel.
    """

    def __init__(self, name: str, kernel: Callable[..., Any], function: Any) -> None:
        self.op = getattr(torch.ops.sparsetir, name).default
        self._kernel, self._function = kernel, function

    def __call__(self, *args: Any) -> Any:
        """Run it, recording what a gradient needs."""
        if torch.compiler.is_compiling() or not is_plain(*args):
            return self.op(*args)
        if self._function is not None and torch.is_grad_enabled():
            for x in args:
                if isinstance(x, Tensor) and x.requires_grad:
                    return self._function.apply(*args)
        return self._kernel(*args)


def define(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    save: Callable[..., None] | None = None,
    autocast: bool = True,
) -> Operator:
    """Register `sparsetir::<schema>`.

    kernel : computes; its results share no memory with its arguments
    fake : the same for tensors without data: shapes, which may be symbolic, and dtypes
    backward : (context, *gradients) -> a gradient or None for each argument. Made of operators
        that have gradients themselves, so that there are second ones
    save : (context, inputs, output) -> None, what `backward` wants, such as :func:`save_inputs`
    autocast : whether float16, bfloat16 and float32 arguments become of autocast's dtype, where
        that is on
    """
    name = schema.split("(")[0]
    full = f"sparsetir::{name}"
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, _in_compiled_code(kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(full, fake, lib=LIBRARY)
    function = None
    if backward is not None and save is not None:
        torch.library.register_autograd(full, backward, setup_context=save, lib=LIBRARY)
        function = _function(name, kernel, backward, save)
    operator = Operator(name, kernel, function)
    if autocast:
        for device in DEVICES:
            LIBRARY.impl(name, _casting(operator.op, device), f"Autocast{device.upper()}")
    return operator


def _function(
    name: str, kernel: Callable[..., Any], backward: Callable[..., Any], save: Callable[..., None]
) -> Any:
    """The same for autograd alone."""

    def forward(ctx: Any, *args: Any) -> Any:
        out = kernel(*args)
        save(ctx, args, out)
        return out

    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), parts)


def _in_compiled_code(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel for the dispatcher, whose callers are compiled code for the most part."""

    def run(*args: Any) -> Any:
        compiled_code.runs = True
        try:
            return kernel(*args)
        finally:
            compiled_code.runs = False

    return run


def _casting(op: Any, device: str) -> Callable[..., Any]:
    """The operator with arguments of autocast's dtype."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device.upper()}"))

    def run(*args: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*(_cast(x, dtype) for x in args))

    return run


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.dtype in AUTOCAST else x


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep all inputs for :func:`saved_inputs`."""
    ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs))
    ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]


def saved_inputs(ctx: Any) -> list[Any]:
    """All inputs of the operator, of which a backward function wants some."""
    pairs = zip(ctx.saved_tensors, ctx.others, strict=True)
    return [other if tensor is None else tensor for tensor, other in pairs]


def is_plain(*args: Any) -> bool:
    """Whether the tensors hold data and nothing watches or changes what is done with them.

    The first argument is a tensor; the others are expected to be on its device.
    """
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None  # type: ignore[attr-defined]
        or forward_ad._current_level >= 0
    ):
        return False
    for x in args:
        kind = type(x)
        if kind is not Tensor and kind is not Parameter and isinstance(x, Tensor):
            return False
    device = args[0].device.type
    return device in DEVICES and not torch.is_autocast_enabled(device)
