"""How operators are made known to torch: autograd, torch.compile, torch.export, autocast and
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

# Kept, as its end would take the operators with it.
LIBRARY = torch.library.Library("sparsetir", "DEF")
AUTOCAST = (torch.float32, torch.float16, torch.bfloat16)
DEVICES = ("cpu", "cuda")
PLAIN = (Tensor, Parameter)  # and no subclass that has a way of its own
# Of the annotations of arguments and results.
TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "int": "SymInt",
    "list[int]": "int[]",
    "float": "float",
    "str": "str",
    "bool": "bool",
}
# Of torch's older vmap, which is no transform of torch.func.
_VMAP: Any = _parse_dispatch_key("VmapMode")
R = TypeVar("R")
P = ParamSpec("P")
Gradients = Mapping[str, Callable[[], Tensor]]


class Context(Protocol):
    """What autograd keeps of a call for its gradient; `others` is what is no tensor."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    others: Sequence[Any]

    def save_for_backward(self, *tensors: object) -> None: ...

    def mark_non_differentiable(self, *tensors: object) -> None: ...


class Operation(Generic[R]):
    """What an operator is: a dataclass of its arguments, in order, and what follows of them.

    autocast : whether float16, bfloat16 and float32 arguments become of autocast's dtype, where
        that is on
    unused : arguments that gradients do not need; they are None there
    keeps : numbers of the results that gradients need; the others are None there
    aside : how many of the results, the last ones, have no gradients
    refuse_gradients : raises, in the call, for arguments that there are no gradients for, by names
    """

    autocast: ClassVar[bool] = True
    unused: ClassVar[tuple[str, ...]] = ()
    keeps: ClassVar[tuple[int, ...]] = ()
    aside: ClassVar[int] = 0
    refuse_gradients: ClassVar[Callable[[Iterable[str]], None] | None] = None
    results: R

    def run(self) -> R:
        """The results, which share no memory with the arguments."""
        raise NotImplementedError

    def fake(self) -> R:
        """The same of tensors without data: shapes, which may be symbolic, and dtypes."""
        raise NotImplementedError

    def gradients(self, grad: Tensor) -> Gradients:
        """By names of arguments what computes their gradients, of that of the first result.

        Made of operators that have gradients themselves, so that there are second ones.
        """
        raise NotImplementedError


class Operator(Generic[P, R]):
    """An operator `torch.ops.sparsetir.NAME`; call it with all arguments in order.

    Calls go to torch's dispatcher where it is needed: under torch.compile and torch.export, for
    autocast and for whatever else watches or changes what operators do. Elsewhere they do not: the
    dispatcher's way through Python takes longer than a small kernel.
    """

    def __init__(self, name: str, kind: Callable[P, Operation[R]]) -> None:
        """Register `sparsetir::NAME`, as a dataclass says."""
        of, names, types = _fields_of(kind)
        returns = of.run.__annotations__["return"].replace("tuple[", "(").replace("]", ")")
        arguments = ", ".join(f"{t} {n}" for t, n in zip(types, names, strict=True))
        schema, full = f"{name}({arguments}) -> {returns}", f"sparsetir::{name}"
        kernel: Callable[..., R] = lambda *args: of(*args).run()  # noqa: E731
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(full, lambda *args: of(*args).fake(), lib=LIBRARY)
        self.op = getattr(torch.ops.sparsetir, name).default
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
        """Run it, recording what a gradient needs."""
        assert not kwargs
        if torch.compiler.is_compiling():
            return self.op(*args)
        if not is_plain(*args):
            # Torch's own way would be wrong there: it forgets derivatives taken forward.
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
    """The same for autograd alone."""

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
    """The same for transforms of torch.func, but for derivatives taken forward."""

    def forward(*args: object) -> object:
        return kernel(*args) if is_plain(*args) else op(*args)

    def jvp(*_: object) -> object:
        raise NotImplementedError(
            f"sparsetir.{name}: has no derivatives taken forward, as by torch.func.jvp, jacfwd and "
            "hessian; use vjp, grad or jacrev"
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
    """An operation, and names and types of its arguments."""
    found = fields(kind)
    return kind, [x.name for x in found], [TYPES[str(x.type)] for x in found]


def _save_of(of: type[Operation[object]], names: list[str]) -> Callable[..., None]:
    """What keeps what gradients want of a call."""
    kept = [name not in of.unused for name in names]

    def save(ctx: Context, inputs: tuple[object, ...], output: object) -> None:
        if of.refuse_gradients is not None:
            of.refuse_gradients(compress(names, ctx.needs_input_grad))
        given = [x if keep else None for x, keep in zip(inputs, kept, strict=True)]
        results = output if isinstance(output, tuple) else (output,)
        given += [x if i in of.keeps else None for i, x in enumerate(results) if of.keeps]
        # A pattern that was made in inference mode has no gradient that torch would have to guard.
        guarded = [
            isinstance(x, Tensor) and (x.is_floating_point() or not x.is_inference()) for x in given
        ]
        ctx.save_for_backward(*(x if g else None for x, g in zip(given, guarded, strict=True)))
        ctx.others = [None if g else x for x, g in zip(given, guarded, strict=True)]
        if of.aside:
            ctx.mark_non_differentiable(*results[-of.aside :])

    return save


def _backward_of(of: Any, names: list[str]) -> Callable[..., object]:
    """What gives the gradients for all arguments, None where they are not wanted."""

    def backward(ctx: Context, grad: Tensor, *_: object) -> object:
        pairs = zip(ctx.saved_tensors, ctx.others, strict=True)
        given = [other if tensor is None else tensor for tensor, other in pairs]
        call = of(*given[: len(names)])
        if of.keeps:
            first, *more = given[len(names) :]
            call.results = (first, *more) if more else first
        found, wanted = call.gradients(grad), ctx.needs_input_grad
        return tuple(
            found[name]() if want and name in found else None
            for name, want in zip(names, wanted, strict=True)
        )

    return backward


def _casting(op: Callable[..., R], device: str) -> Callable[..., R]:
    """The operator with arguments of autocast's dtype."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device.upper()}"))

    def run(*args: object) -> R:
        dtype = torch.get_autocast_dtype(device)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*(_cast(x, dtype) for x in args))

    return run


def _cast(x: object, dtype: torch.dtype) -> object:
    return x.to(dtype) if isinstance(x, Tensor) and x.dtype in AUTOCAST else x


def _unviewed(x: Any) -> Any:
    """The same memory: torch refuses writes to a view that an autograd function gives."""
    return x.detach() if x._is_view() else x


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether a gradient is recorded for one of them."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def is_plain(*args: Any) -> bool:
    """Whether the tensors hold data and nothing watches or changes what is done with them.

    The first argument is a tensor; the others are expected to be on its device.
    """
    return holds_data(*args) and not torch.is_autocast_enabled(args[0].device.type)


def holds_data(*args: Any) -> bool:
    """As :func:`is_plain`, whether or not autocast changes types."""
    if is_transformed():
        return False
    for x in args:
        kind = type(x)
        if kind is not Tensor and kind is not Parameter:
            if isinstance(x, Tensor):
                return False
        elif not _has_storage(x):  # many gradients in one, or of a transform that has ended since
            return False
    return args[0].device.type in DEVICES


def is_undisturbed() -> bool:
    """Whether nothing watches or changes what is done on a CPU: no trace, transform or autocast."""
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
    """Whether tensors may stand for many: torch computes vectorised Jacobians, or gradients with
    `is_grads_batched`."""
    return _dispatch_tls_is_dispatch_key_included(_VMAP)


def is_transformed() -> bool:
    """Whether results may be no data: under a dispatch mode, a transform of torch.func, tracing."""
    return (
        bool(torch._C._len_torch_dispatch_stack())
        or _is_differentiated()
        or torch._C._get_tracing_state() is not None
    )


def _is_differentiated() -> bool:
    """Whether there is a transform of torch.func, or derivatives are taken forward."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0
