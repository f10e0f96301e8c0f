"""PyG's layers through the backend of `torch.compile`, one by one, without their user's asking.

A layer's `forward` becomes one graph, with gradients, which torch guards: other shapes, types or
attributes compile again. Where it does not become one graph, or has no region, PyG runs as it did.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._dynamo import exc
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from sparsetir.ops.registry import is_transformed

Run = Callable[[Any, Any, Any], Any]

INDICES = (torch.int32, torch.int64)
PLAIN = (int, float, str, bool, type(None), torch.Size)  # constants of graphs
# Functions of a layer that are its user's where an instance has them.
METHODS = ("message", "aggregate", "message_and_aggregate", "update")
OWN = ("forward", "propagate", *METHODS, "edge_update", "edge_updater")
HOOKED = ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
HOOKS = tuple(f"_{name}_forward{pre}_hooks" for name in HOOKED for pre in ("", "_pre"))
OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_number = itertools.count()
# Of a class by what its layers' graphs depend on. Layers that are alike have one function.
_functions: WeakKeyDictionary[type, dict[Hashable, Run]] = WeakKeyDictionary()
# What torch raises for what it does not trace or compile. Once a layer has run, others are for the
# caller: checkpoints end calls by one.
NOT_COMPILED = (
    exc.TorchDynamoException,
    getattr(exc, "FailOnRecompileLimitHit", exc.TorchDynamoException),
)
Failures = type[Exception] | tuple[type[Exception], ...]
# Of a layer by mode, and what it may raise; None where it is left to PyG.
_of_layers: WeakKeyDictionary[nn.Module, dict[Hashable, tuple[Run, Failures] | None]]
_of_layers = WeakKeyDictionary()


def most_edges(args: object) -> int:
    """Edges of the largest pair of indices among arguments."""
    pairs = (x for x in tree_leaves(args) if isinstance(x, Tensor) and x.dtype in INDICES)
    return max((x.shape[1] for x in pairs if x.dim() == 2 and x.shape[0] == 2), default=0)


def run_layer(
    layer: Any, old: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A call of a layer, compiled where that is possible, else by `old`."""
    if not _is_usual(layer) or not all(map(_is_plain, tree_leaves((args, kwargs)))):
        return old(layer, *args, **kwargs)
    mode = layer.training, torch.is_grad_enabled()
    of_layer = _of_layers.setdefault(layer, {})
    if mode not in of_layer:
        if any(map(is_lazy, layer.parameters())):  # which its first call makes
            return old(layer, *args, **kwargs)
        of_layer[mode] = (_function(layer, mode), Exception) if _is_alone(layer) else None
    known = of_layer[mode]
    if known is not None:
        run, failures = known
        try:
            found = run(layer, args, kwargs)
            of_layer[mode] = run, NOT_COMPILED
            return found
        except failures:  # or these arguments are wrong
            pass
    found = old(layer, *args, **kwargs)  # which says what is wrong
    of_layer[mode] = None
    return found


def _is_usual(layer: Any) -> bool:
    """Whether a layer and torch are in a state in which graphs are what PyG would do."""
    return (
        not any(getattr(layer, name) for name in HOOKS)
        and not any(map(is_hooked, layer.modules()))
        and not _has_any_global_hook()
        and not layer.explain
        and layer._compiled_call_impl is None
        and vars(layer).keys().isdisjoint(OWN)
        and not is_transformed()
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._len_torch_function_stack()
    )


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody looks on; torch's graphs do not ask that again."""
    return any(getattr(module, name) for name in OF_MODULES)


def _is_plain(x: Any) -> bool:
    """Whether an argument may be one of a graph: no EdgeIndex, no sparse matrix."""
    if not isinstance(x, Tensor):
        return isinstance(x, PLAIN)
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.device.type == "cpu"
        and x.layout is torch.strided
        and (x.dtype is torch.float32 or not x.is_floating_point())
    )


def _is_alone(layer: Any) -> bool:
    """Whether a layer has parameters as usual, and no layers of PyG in it, which run by
    themselves."""
    from torch_geometric.nn import MessagePassing

    inner = any(isinstance(x, MessagePassing) for x in layer.modules() if x is not layer)
    return not inner and all(map(_is_plain, (*layer.parameters(), *layer.buffers())))


def _function(layer: Any, mode: Hashable) -> Run:
    """The compiled function of layers that are like this one."""
    constants = frozenset((n, x) for n, x in vars(layer).items() if isinstance(x, PLAIN))
    shapes = tuple(x.shape for x in (*layer.parameters(), *layer.buffers()))
    functions = _functions.setdefault(type(layer), {})
    key = mode, constants, shapes
    if key not in functions:
        functions[key] = _compiled(f"{type(layer).__name__}_{next(_number)}")
    return functions[key]


def _call(layer: Any, args: Any, kwargs: Any) -> Any:
    return layer.forward(*args, **kwargs)


def _compiled(name: str) -> Run:
    """What calls layers, compiled at its first call.

    torch keeps graphs, their number and sizes that have changed by code: each function has its own.
    """
    from sparsetir.graph.backend import at_once

    made = FunctionType(_call.__code__.replace(co_name=name), globals(), name)
    return torch.compile(made, backend=at_once, fullgraph=True)
