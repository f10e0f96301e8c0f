"""Automatic compilation of single PyG layers by the backend of `torch.compile`.

A layer's `forward` becomes one graph, with gradients, which torch guards: other shapes, types or
attributes compile again. If it does not become one graph, or has no region, PyG runs unchanged.
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
from sparsetir.ops.tensors import DTYPES

Run = Callable[[Any, Any, Any], Any]

INDICES = (torch.int32, torch.int64)
PLAIN = (int, float, str, bool, type(None), torch.Size)  # constants of graphs
# Methods of layers; as attributes of an instance they are the user's.
METHODS = ("message", "aggregate", "message_and_aggregate", "update")
OWN = ("forward", "propagate", *METHODS, "edge_update", "edge_updater")
HOOKED = ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
HOOKS = tuple(f"_{name}_forward{pre}_hooks" for name in HOOKED for pre in ("", "_pre"))
OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_number = itertools.count()
# Functions by class, and by properties that graphs depend on. Equal layers share a function.
_functions: WeakKeyDictionary[type, dict[Hashable, Run]] = WeakKeyDictionary()
# Torch's exceptions for code that it cannot trace or compile. Once a layer has run, others go to
# the caller: checkpointing ends calls by one.
NOT_COMPILED = (
    exc.TorchDynamoException,
    getattr(exc, "FailOnRecompileLimitHit", exc.TorchDynamoException),
)
Failures = type[Exception] | tuple[type[Exception], ...]
# Functions by layer and mode, with the exceptions to catch; None if left to PyG.
_of_layers: WeakKeyDictionary[nn.Module, dict[Hashable, tuple[Run, Failures] | None]]
_of_layers = WeakKeyDictionary()
# Numbers of edges of a layer's first call, or None once they differed, by whether it was training.
_edges: WeakKeyDictionary[nn.Module, dict[bool, int | None]] = WeakKeyDictionary()


def most_edges(args: object) -> int:
    """The number of edges of the largest edge index among arguments."""
    pairs = (x for x in tree_leaves(args) if isinstance(x, Tensor) and x.dtype in INDICES)
    return max((x.shape[1] for x in pairs if x.dim() == 2 and x.shape[0] == 2), default=0)


def varies(layer: nn.Module, edges: int) -> bool:
    """Whether calls of a layer, of which this is one, differ in their number of edges."""
    seen = _edges.setdefault(layer, {})
    if seen.setdefault(layer.training, edges) != edges:
        seen[layer.training] = None
    return seen[layer.training] is None


def run_layer(
    layer: Any, old: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
    dynamic: bool = False,
) -> Any:  # fmt: skip
    """Call a layer, compiled if possible, else by `old`.

    dynamic : whether to compile it for graphs of all sizes at once, if it is not compiled yet
    """
    if not _is_usual(layer) or not all(map(_is_plain, tree_leaves((args, kwargs)))):
        return old(layer, *args, **kwargs)
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    mode = layer.training, torch.is_grad_enabled(), autocast
    of_layer = _of_layers.setdefault(layer, {})
    if mode not in of_layer:
        if any(map(is_lazy, layer.parameters())):  # the first call creates them
            return old(layer, *args, **kwargs)
        of_layer[mode] = (_function(layer, mode, dynamic), Exception) if _is_alone(layer) else None
    compiled = of_layer[mode]
    if compiled is not None:
        run, failures = compiled
        try:
            out = run(layer, args, kwargs)
            of_layer[mode] = run, NOT_COMPILED
            return out
        except failures:  # or the arguments are invalid
            pass
    out = old(layer, *args, **kwargs)  # raises for invalid arguments
    of_layer[mode] = None
    return out


def _is_usual(layer: Any) -> bool:
    """Whether the state of the layer and of torch permits a graph in place of PyG."""
    return (
        not any(getattr(layer, name) for name in HOOKS)
        and not any(map(is_hooked, layer.modules()))
        and not _has_any_global_hook()
        and not layer.explain
        and layer._compiled_call_impl is None
        and vars(layer).keys().isdisjoint(OWN)
        and not is_transformed()
        and not torch._C._len_torch_function_stack()
    )


def is_hooked(module: nn.Module) -> bool:
    """Whether a module has hooks, which torch's graphs do not check again."""
    return any(getattr(module, name) for name in OF_MODULES)


def _is_plain(x: Any) -> bool:
    """Whether an argument is supported by graphs: no EdgeIndex, no sparse matrix."""
    if not isinstance(x, Tensor):
        return isinstance(x, PLAIN)
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.device.type == "cpu"
        and x.layout is torch.strided
        and (x.dtype in DTYPES or not x.is_floating_point())
    )


def _is_alone(layer: Any) -> bool:
    """Whether a layer has plain parameters, and contains no other layers of PyG, which are
    compiled themselves."""
    from torch_geometric.nn import MessagePassing

    inner = any(isinstance(x, MessagePassing) for x in layer.modules() if x is not layer)
    return not inner and all(map(_is_plain, (*layer.parameters(), *layer.buffers())))


def _function(layer: Any, mode: Hashable, dynamic: bool) -> Run:
    """The compiled function shared by layers like this one."""
    constants = frozenset((n, x) for n, x in vars(layer).items() if isinstance(x, PLAIN))
    shapes = tuple((x.shape, x.dtype) for x in (*layer.parameters(), *layer.buffers()))
    functions = _functions.setdefault(type(layer), {})
    key = mode, constants, shapes, dynamic
    if key not in functions:
        functions[key] = _compiled(f"{type(layer).__name__}_{next(_number)}", dynamic)
    return functions[key]


def _call(layer: Any, args: Any, kwargs: Any) -> Any:
    return layer.forward(*args, **kwargs)


def _compiled(name: str, dynamic: bool) -> Run:
    """A function that calls layers, compiled at its first call.

    Torch keeps graphs, their number and changed sizes per code object: each function has its own.
    """
    from sparsetir.graph.backend import strict_backend

    function = FunctionType(_call.__code__.replace(co_name=name), globals(), name)
    # None: torch makes sizes symbolic once they change.
    return torch.compile(function, backend=strict_backend, fullgraph=True, dynamic=dynamic or None)
