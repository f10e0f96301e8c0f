"""Compiled graphs kept in files across processes, beside their kernels.

Where kernels are kept, torch's AOTAutograd takes half of a model's first step: it traces each
operator twice, forward and backward. Torch has a cache of its results, by the graph that dynamo
traced, the types of its inputs, and torch's settings, for compilers whose results can be pickled.
Here it is used with the folder of the kernels, for the circumstances that they depend on.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx.node import map_aggregate, map_arg
from torch.utils._python_dispatch import _disable_current_modes

from sparsetir.graph import ahead
from sparsetir.graph.operator import Region, RegionProduct
from sparsetir.graph.products import Run
from sparsetir.runtime.kernel_cache import folder_of_graph, keeps

try:
    from torch._functorch._aot_autograd import autograd_cache
    from torch._functorch._aot_autograd.autograd_cache import (
        AOTAutogradCacheDetails,
        BypassAOTAutogradCache,
    )
    from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
    from torch._inductor.output_code import OutputCode

    HAS_CACHE = hasattr(AOTAutogradCacheDetails, "_init_fx_graph_hash_details") and (
        "_get_tmp_dir_for_key" in vars(autograd_cache.AOTAutogradCache)
    )
except ImportError:  # torch before 2.13
    HAS_CACHE, AOTAutogradCacheDetails, OutputCode = False, object, object
# Torch's options: results are in entries of the cache, which have forward and backward.
OPTIONS = {
    "enable_autograd_cache": True, "bundled_autograd_cache": True,
    "force_non_lazy_backward_lowering": True,
}  # fmt: skip
# Others' operators may change, and what torch traces of them, while their names stay.
NAMESPACES = {"aten", "prim", "prims", "sparsetir"}


def may_keep() -> bool:
    """Whether torch has the cache, and there is a folder."""
    return HAS_CACHE and keeps()


@contextmanager
def keeping() -> Iterator[None]:
    """Have torch look up graphs among the kernels, and keep them there."""
    cache: Any = autograd_cache.AOTAutogradCache
    place = cache.__dict__["_get_tmp_dir_for_key"]
    cache._get_tmp_dir_for_key = classmethod(lambda _, key: str(folder_of_graph(key)))
    autograd_cache.AOTAutogradCacheDetails = _Details
    try:
        with functorch_config.patch(OPTIONS):
            yield
    finally:
        cache._get_tmp_dir_for_key = place
        autograd_cache.AOTAutogradCacheDetails = AOTAutogradCacheDetails


def compiler(compile: Callable[[fx.GraphModule, Any], Code]) -> Any:
    """A compiler whose results torch keeps within :func:`keeping`."""
    return SerializableAOTDispatchCompiler(Code, compile)


class Code(OutputCode):  # type: ignore[misc, valid-type]
    """A function of a graph that can be pickled.

    make : a function of a module, which makes it of `parts`
    parts : graphs, and what else it is made of
    """

    def __init__(self, make: Callable[..., Any], *parts: Any) -> None:
        super().__init__()
        self._boxed_call = True
        self._parts: Any = make, parts
        self._run: Any = make(*parts)

    def __call__(self, inputs: list[Any]) -> Any:
        return self._run(inputs)

    def prepare_for_serialization(self) -> None:
        """Replace the function by bytes, in the copy that torch pickles."""
        memory = io.BytesIO()
        try:
            with _disable_current_modes():  # torch traces with tensors without values
                _Pickler(memory).dump(self._parts)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise BypassAOTAutogradCache(str(error)) from error
        self._parts, self._run = memory.getvalue(), None

    def post_compile(self, *_: Any) -> None:
        """Make the function of its bytes."""
        with _disable_current_modes():
            self._parts = make, parts = pickle.loads(self._parts)
            self._run = make(*parts)

    def set_triton_bundle(self, _: Any) -> None:
        """Do nothing, as there is no code of Triton's."""


class _Details(AOTAutogradCacheDetails):  # type: ignore[misc, valid-type]
    """The key of a kept graph, besides what torch's class says of autograd.

    Torch's method has the settings of Inductor, too, whose import takes longer than all the rest.
    """

    def _init_fx_graph_hash_details(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], _: Any
    ) -> None:
        others = {_namespace(node.target) for node in gm.graph.nodes} - NAMESPACES - {""}
        if others:
            raise BypassAOTAutogradCache(f"operators of {sorted(others)} may change")
        if gm.graph.find_nodes(op="get_attr"):  # whose values are no part of the key
            raise BypassAOTAutogradCache("constants of the model")
        tensors = [x for x in example_inputs if isinstance(x, Tensor)]
        memory = {x.untyped_storage()._cdata for x in tensors}
        numbers = [x for x in example_inputs if isinstance(x, torch.SymInt | int)]
        if len(memory) + len(numbers) < len(example_inputs):
            raise BypassAOTAutogradCache("inputs that share memory, or of other types")
        self.gm, self.example_inputs = gm, example_inputs
        env = autograd_cache.AOTAutogradCache._get_shape_env()
        self.hints = str(env and sorted((str(k), v) for k, v in env.var_to_hint_override.items()))
        deterministic: Any = torch.utils.deterministic
        self.settings = (
            torch.__version__, torch.get_default_dtype(), torch.backends.mkldnn.enabled,
            torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled(),
            torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy,
            deterministic.fill_uninitialized_memory,
        )  # fmt: skip


def _namespace(target: Any) -> str:
    """The namespace of a torch operator; "" for another target of a node."""
    if isinstance(target, OpOverload):
        return target.namespace
    is_packet = isinstance(target, OpOverloadPacket)
    return target._qualified_op_name.partition("::")[0] if is_packet else ""


class _Pickler(pickle.Pickler):
    """A pickler of graphs of operators and regions, whose constants are numbers."""

    def reducer_override(self, x: Any) -> Any:
        if isinstance(x, fx.GraphModule):
            constants = {n.target: getattr(x, n.target) for n in x.graph.find_nodes(op="get_attr")}
            return _module, (_nodes(x.graph), constants)
        if isinstance(x, OpOverload):
            return _operator, (x.namespace, x._opname, x._overloadname)
        if isinstance(x, Region | RegionProduct):
            return type(x), (x.program,)
        if isinstance(x, Run):
            return Run, (x.gradient,)
        if isinstance(x, Tensor) and x.dim():
            raise pickle.PicklingError("tensors are not kept")
        if isinstance(x, Tensor):
            return partial(torch.tensor, dtype=x.dtype), (x.item(),)
        return NotImplemented


class _Number(int):
    """The number of a node, among the arguments of another."""


def _nodes(graph: fx.Graph) -> list[tuple[Any, ...]]:
    numbers = {node: _Number(n) for n, node in enumerate(graph.nodes)}

    def numbered(x: Any) -> Any:
        return map_arg(x, lambda node: numbers[node])

    return [(n.op, n.target, numbered(n.args), numbered(n.kwargs), n.name) for n in graph.nodes]


def _module(nodes: list[tuple[Any, ...]], constants: dict[str, Any]) -> fx.GraphModule:
    graph, new_nodes = fx.Graph(), list[fx.Node]()
    regions = [target for _, target, *_ in nodes if isinstance(target, Region | RegionProduct)]
    ahead.begin(region.program.expected() for region in regions)

    def node(x: Any) -> Any:
        return new_nodes[x] if type(x) is _Number else x

    for op, target, args, kwargs, name in nodes:
        args, kwargs = map_aggregate(args, node), map_aggregate(kwargs, node)
        new_nodes.append(graph.create_node(op, target, args, kwargs, name))
    return fx.GraphModule(constants, graph)


def _operator(namespace: str, name: str, overload: str) -> OpOverload:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)
