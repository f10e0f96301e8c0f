"""Registration of operators with torch: autograd, torch.compile, torch.export, autocast and
torch.func."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import compress
from typing import Any, ClassVar, Generic, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch._C import (
    _dispatch_tls_is_dispatch_key_included,
    _get_tracing_state,
    _has_storage,
    _len_torch_dispatch_stack,
    _parse_dispatch_key,
)
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.nn import Parameter

# Kept alive, as the operators would be unregistered with it.
LIBRARY = torch.library.Library("sparsetir", "DEF")
AUTOCAST = (torch.float32, torch.float16, torch.bfloat16)
DEVICES = ("cpu", "cuda")
PLAIN = (Tensor, Parameter)  # types without a __torch_function__ of their own
# Schema types by the annotations of arguments and results.
TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "int": "SymInt",
    "list[int]": "int[]",
    "float": "float",
    "str": "str",
    "bool": "bool",
}
# The dispatch key of torch's older vmap, which is not a transform of torch.func.
_VMAP: Any = _parse_dispatch_key("VmapMode")
R = TypeVar("R")
P = ParamSpec("P")
Gradients = Mapping[str, Callable[[], Tensor]]


class Context(Protocol):
    """Autograd's context of a call; `others` holds its arguments that are not tensors."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    others: Sequence[Any]

    def save_for_backward(self, *tensors: object) -> None: ...

    def mark_non_differentiable(self, *tensors: object) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


class Operation(Generic[R]):
    """The definition of an operator: a dataclass of its arguments, in order.

    autocast : whether autocast, if it is on, casts float16, bfloat16 and float32 arguments
    unused : names of arguments that gradients do not need; they are None there
    keeps : indices of the results that gradients need; the others are None there
    copies : whether gradients need a copy of the result, as callers may write to it
    aside : number of trailing results without gradients
    refuse_gradients : raises, in the call, for arguments (by names) that have no gradients
    """

    autocast: ClassVar[bool] = True
    unused: ClassVar[tuple[str, ...]] = ()
    keeps: ClassVar[tuple[int, ...]] = ()
    copies: ClassVar[bool | property] = False
    aside: ClassVar[int] = 0
    refuse_gradients: ClassVar[Callable[[Iterable[str]], None] | None] = None
    results: R

    def run(self) -> R:
        """The results, which share no memory with the arguments."""
        raise NotImplementedError

    def fake(self) -> R:
        """The results without data: their shapes, which may be symbolic, and dtypes."""
        raise NotImplementedError

    def gradients(self, grad: Tensor) -> Gradients:
        """Functions that compute gradients, by names of arguments, from that of the first result.

        They use operators that have gradients themselves, so that second ones exist.
        """
        raise NotImplementedError


class Operator(Generic[P, R]):
    """An operator `torch.ops.sparsetir.NAME`; call it with all arguments in order.

    Calls go to torch's dispatcher where it is needed: under torch.compile and torch.export, for
    autocast and for other modes that observe or change operators. Elsewhere they bypass it: the
    dispatcher's path through Python takes longer than a small kernel.
    """

    def __init__(self, name: str, kind: Callable[P, Operation[R]]) -> None:
        """Register `sparsetir::NAME` as the dataclass `kind` defines it."""
        of, names, types = _fields_of(kind)
        returns = of.run.__annotations__["return"].replace("tuple[", "(").replace("]", ")")
        arguments = ", ".join(f"{t} {n}" for t, n in zip(types, names, strict=True))
        schema, full = f"{name}({arguments}) -> {returns}", f"sparsetir::{name}"
        kernel: Callable[..., R] = lambda *args: of(*args).run()  # noqa: E731
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(full, lambda *args: of(*args).fake(), lib=LIBRARY)
        self.op = getattr(torch.ops.sparsetir, name).default
        torch.library.register_vmap(full, _one_by_one(self.op), lib=LIBRARY)
        self.kernel = kernel
        self._function = self._transformed = None
        if of.gradients is not Operation.gradients:
            save, back = _save_of(of, names), _backward_of(of, names)
            torch.library.register_autograd(full, back, setup_context=save, lib=LIBRARY)
            self._function = _function(name, kernel, back, save)
            self._transformed = _transformed(name, self.op, kernel, back, save)
        if of.autocast:
            for device in DEVICES:
                LIBRARY.impl(name, _casting(self.op, device), f"Autocast{device.upper()}")

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the operator, recording for autograd where needed."""
        assert not kwargs
        if torch.compiler.is_compiling():
            return self.op(*args)
        if not is_plain(*args):
            # Torch's own path would be wrong: it drops forward-mode derivatives.
            if self._transformed is not None and _is_differentiated():
                return self._transformed.apply(*args)
            return self.op(*args)
        if self._function is not None and torch.is_grad_enabled():
            for x in args:
                if isinstance(x, Tensor) and x.requires_grad:
                    return self._function.apply(*args)
        return self.kernel(*args)


def _function(
    name: str,
    kernel: Callable[..., object],
    backward: Callable[..., object],
    save: Callable[..., None],
) -> Any:
    """The operator as an autograd function."""

    def forward(ctx: Context, *args: object) -> object:
        out = kernel(*args)
        out = tuple(map(_unviewed, out)) if isinstance(out, tuple) else _unviewed(out)
        save(ctx, args, out)
        return out

    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), parts)


def _transformed(
    name: str,
    op: Callable[..., object],
    kernel: Callable[..., object],
    backward: Callable[..., object],
    save: Callable[..., None],
) -> Any:
    """The operator as an autograd function for torch.func, without forward-mode derivatives."""

    def forward(*args: object) -> object:
        return kernel(*args) if is_plain(*args) else op(*args)

    def jvp(*_: object) -> object:
        raise NotImplementedError(
            f"sparsetir.{name}: has no forward-mode derivatives, which torch.func.jvp, jacfwd and "
            "hessian need; use vjp, grad or jacrev"
        )

    parts = {
        "forward": staticmethod(forward),
        "setup_context": staticmethod(save),
        "backward": staticmethod(backward),
        "jvp": staticmethod(jvp),
        "generate_vmap_rule": True,
    }
    return type(name, (torch.autograd.Function,), parts)


def _fields_of(kind: Any) -> tuple[type[Operation[Any]], list[str], list[str]]:
    """The operation, and the names and types of its arguments."""
    arguments = fields(kind)
    return kind, [x.name for x in arguments], [TYPES[str(x.type)] for x in arguments]


def _save_of(of: type[Operation[object]], names: list[str]) -> Callable[..., None]:
    """The function that saves the tensors and arguments that gradients need."""
    kept = [name not in of.unused for name in names]

    def save(ctx: Context, inputs: tuple[object, ...], output: Any) -> None:
        if of.refuse_gradients is not None:
            of.refuse_gradients(compress(names, ctx.needs_input_grad))
        saved = [x if keep else None for x, keep in zip(inputs, kept, strict=True)]
        results = output if isinstance(output, tuple) else (output,)
        saved += [x if i in of.keeps else None for i, x in enumerate(results) if of.keeps]
        if of.copies and of(*inputs).copies:
            saved.append(results[0].detach().clone())
        # Patterns made in inference mode need no guard of torch's, as they have no gradients.
        guarded = [
            isinstance(x, Tensor) and (x.is_floating_point() or not x.is_inference()) for x in saved
        ]
        ctx.save_for_backward(*(x if g else None for x, g in zip(saved, guarded, strict=True)))
        ctx.others = [None if g else x for x, g in zip(saved, guarded, strict=True)]
        if of.aside:
            ctx.mark_non_differentiable(*results[-of.aside :])

    return save


def _backward_of(of: Any, names: list[str]) -> Callable[..., object]:
    """The function that returns the gradients of all arguments, None for unwanted ones."""

    def backward(ctx: Context, grad: Tensor, *_: object) -> object:
        pairs = zip(ctx.saved_tensors, ctx.others, strict=True)
        saved = [other if tensor is None else tensor for tensor, other in pairs]
        call = of(*saved[: len(names)])
        if of.keeps or call.copies:
            first, *more = saved[len(names) :]
            call.results = (first, *more) if more else first
        gradients, wanted = call.gradients(grad), ctx.needs_input_grad
        return tuple(
            gradients[name]() if want and name in gradients else None
            for name, want in zip(names, wanted, strict=True)
        )

    return backward


def _casting(op: Callable[..., R], device: str) -> Callable[..., R]:
    """The operator with its arguments cast to autocast's dtype."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device.upper()}"))

    def run(*args: object) -> R:
        dtype = torch.get_autocast_dtype(device)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*(_cast(x, dtype) for x in args))

    return run


def _one_by_one(op: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """The rule of torch.func.vmap that calls the operator for each part of a batch.

    torch does the same by itself, with a warning that asks users to report it.
    """

    def rule(info: Any, dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        count, shared = info.batch_size, [d is None for d in dims]
        each = [x if d is None else x.movedim(d, 0) for x, d in zip(args, dims, strict=True)]
        if count == 0:  # the shapes of results are those of zeros
            pairs = zip(each, shared, strict=True)
            each = [x if alike else x.new_zeros((1, *x.shape[1:])) for x, alike in pairs]
        parts = [
            op(*(x if alike else x[n] for x, alike in zip(each, shared, strict=True)))
            for n in range(count or 1)
        ]
        if isinstance(parts[0], tuple):
            out = tuple(torch.stack(x)[:count] for x in zip(*parts, strict=True))
            return out, (0,) * len(out)
        return torch.stack(parts)[:count], 0

    return rule


def _cast(x: object, dtype: torch.dtype) -> object:
    return x.to(dtype) if isinstance(x, Tensor) and x.dtype in AUTOCAST else x


def _unviewed(x: Any) -> Any:
    """x, not as a view: torch refuses writes to a view that an autograd function returns."""
    return x.detach() if x._is_view() else x


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether a gradient is recorded for one of them."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def is_plain(*args: Any) -> bool:
    """Whether the tensors hold data and no mode observes or changes operations on them.

    The first argument is a tensor; the others are expected to be on its device.
    """
    return holds_data(*args) and not torch.is_autocast_enabled(args[0].device.type)


def holds_data(*args: Any) -> bool:
    """:func:`is_plain`, but autocast may be on."""
    if is_transformed():
        return False
    for x in args:
        kind = type(x)
        if kind is not Tensor and kind is not Parameter:
            if isinstance(x, Tensor):
                return False
        elif not _has_storage(x):  # batched gradients, or left over from a transform
            return False
    return args[0].device.type in DEVICES


def is_plain_eager() -> bool:
    """Whether no trace, transform or autocast observes or changes operations on a CPU."""
    return not (
        torch.compiler.is_compiling()
        or _len_torch_dispatch_stack()
        or peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or _get_tracing_state() is not None
        or torch.is_autocast_enabled("cpu")
        or is_batched()
    )


def is_batched() -> bool:
    """Whether tensors may be batched: in vectorised Jacobians, or gradients with
    `is_grads_batched`."""
    return _dispatch_tls_is_dispatch_key_included(_VMAP)


def is_transformed() -> bool:
    """Whether results may lack data: under a dispatch mode, a torch.func transform or tracing."""
    return (
        bool(torch._C._len_torch_dispatch_stack())
        or _is_differentiated()
        or torch._C._get_tracing_state() is not None
    )


def _is_differentiated() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is active."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0
