"""`torch.compile(model, backend="sparsetir")`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from functorch.compile import default_partition, make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd

from sparsetir.graph.operator import PROGRAMS, Region, region
from sparsetir.graph.prelude import Prelude, Test, copy_results, following, is_of_edges, split
from sparsetir.graph.regions import Found, rewrite

# As under torch.compile(fullgraph=True): self loops that are taken out of edges, whose number only
# their contents tell, would break a model into several graphs.
torch._dynamo.config.capture_dynamic_output_shape_ops = True


@dataclass
class Graph:
    """What became of a graph of torch's.

    found, left : regions, and gathers and reductions that are none, with reasons
    preludes : what follows from the edges alone
    """

    found: list[Found] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    preludes: list[Prelude] = field(default_factory=list)


class Backend:
    """A backend of torch.compile that keeps what it did.

    graphs : that were compiled, in order
    """

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self.__name__ = "sparsetir"

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_graph(module, inputs, self.graphs.append)


def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """The backend, which torch finds by the name "sparsetir"."""
    return compile_graph(module, inputs)


def compile_graph(
    module: fx.GraphModule, inputs: Sequence[Any], tell: Callable[[Graph], None] = lambda _: None
) -> Callable[..., Any]:
    """What runs a graph of dynamo's; `tell` is told what became of it."""
    about = Graph()
    tell(about)
    of_edges: list[str] = []  # names of arguments

    def partition(joint: fx.GraphModule, given: Any, *, num_fwd_outputs: int, **more: Any) -> Any:
        places = [n for n in joint.graph.nodes if n.op == "placeholder"]
        (output,) = joint.graph.find_nodes(op="output")
        gradients = output.args[0][num_fwd_outputs:]
        arguments = places[: len(gradients)]
        known = [n for n, g in zip(arguments, gradients, strict=True) if g is None]
        test = is_of_edges(known)
        of_edges.extend(n.name for n in known if test(n))
        _rewritten(joint, about, num_fwd_outputs, test)
        return default_partition(joint, given, num_fwd_outputs=num_fwd_outputs, **more)

    def forward(graph: fx.GraphModule, _: Any) -> Any:
        return _runner(graph, about, lambda node: node.name in of_edges)

    def backward(graph: fx.GraphModule, _: Any) -> Any:
        return _runner(graph, about, None)

    def inference(graph: fx.GraphModule, _: Any) -> Any:
        test = is_of_edges([n for n in graph.graph.nodes if n.op == "placeholder"])
        (output,) = graph.graph.find_nodes(op="output")
        _rewritten(graph, about, len(output.args[0]), test)
        test = is_of_edges([n for n in graph.graph.nodes if n.op == "placeholder"])
        return _runner(graph, about, test)

    compiler = aot_autograd(
        fw_compiler=forward, bw_compiler=backward, inference_compiler=inference,
        partition_fn=partition,
    )  # fmt: skip
    return compiler(module, inputs)


def _rewritten(module: fx.GraphModule, about: Graph, results: int, is_edges: Test) -> None:
    names = {n.name for n in module.graph.nodes if n.op == "placeholder" and is_edges(n)}

    def test(node: fx.Node) -> bool:
        return node.name in names

    found, left = rewrite(module, lambda graph: following(graph, test)[0])
    about.found += found
    about.left += left
    copy_results(module.graph, results, test)


def _runner(graph: fx.GraphModule, about: Graph, is_edges: Test | None) -> Callable[..., Any]:
    """What runs a graph, with what follows from edges alone apart."""
    prelude = None if is_edges is None else split(graph, is_edges)
    if prelude is None:
        return make_boxed_func(_direct(graph).forward)
    about.preludes.append(prelude)
    main = _direct(prelude.main).forward

    def run(*args: Any) -> Any:
        return main(*prelude(args))

    return make_boxed_func(run)


def _direct(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph with calls of regions that torch's dispatcher does not see."""
    for node in graph.graph.nodes:
        if node.target is region:
            number, *rest = node.args
            node.target, node.args = Region(PROGRAMS[number]), tuple(rest)
    graph.recompile()
    return graph
