"""Explanations of models under `torch.compile(model, backend="sparsetir")`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from sparsetir.graph.backend import Backend, Graph
from sparsetir.graph.costs import module_table, table
from sparsetir.runtime.texts import aligned

RUNS = 3  # measured runs, after one that compiles


class Explanation:
    """The result of :func:`explain`; `print` shows it.

    Parameters
    ----------
    graphs : list of Graph
        Torch's graphs, in the order of compilation; more than one if the model breaks.
        `call(number)` of one is a region with its arguments: `sparsetir.tune(call.function,
        call.arguments)` records a schedule for models that are compiled later, on the same edges.
    """

    def __init__(self, graphs: list[Graph]) -> None:
        self.graphs = graphs

    def __str__(self) -> str:
        return "\n".join(self._lines(programs=False))

    __repr__ = __str__

    def programs(self) -> str:
        """The regions of each graph with their programs."""
        return "\n".join(self._lines(programs=True))

    def _lines(self, programs: bool) -> Iterator[str]:
        for n, graph in enumerate(self.graphs):
            yield f"graph {n}: {len(graph.found)} regions, {len(graph.left)} operators left"
            for part in (part for p in graph.preludes for part in p.parts):
                count, kept = len(part.computed), ", ".join(part.results)
                yield f"once for each tensor of edges: {count} operators, for {kept}"
            for number, region in enumerate(graph.found if programs else ()):
                of = f" of {region.module}" if region.module else ""
                yield f"\nregion {number}, {region.node} {region.shape}{of}:"
                yield region.program.text((True,) * len(region.program.operands)).rstrip()
            costs = [cost for measured in graph.measured for cost in measured.costs.values()]
            if costs and not programs:
                yield from ("", *aligned(table(costs)))
                if any(cost.module for cost in costs):
                    yield from ("", *aligned(module_table(costs)))
            if graph.left:
                yield "\nleft to torch:"
                yield from (f"  {line}" for line in graph.left)
            for direction, why in graph.rest.items():
                if why:
                    yield f"{direction}, without Inductor: {why}"


def explain(model: Any, *inputs: Any, **options: Any) -> Explanation:
    """Show the regions that `torch.compile(model, backend="sparsetir")` makes of a model.

    Parameters
    ----------
    model : torch.nn.Module or function
        The model, compiled or not. It is run four times, forward and backward, in its current
        training mode. A module is copied first, so that its parameters and buffers are not changed.
    *inputs, **options
        Its arguments. Gradients are computed where parameters or inputs require them.

    Returns
    -------
    Explanation
        Print it: for each graph the operators computed once per tensor of edges; the slowest
        regions and torch operators, with the modules that they stem from, milliseconds (the minimum
        of three runs, measured one by one), the megabytes of the result, whether it holds several
        numbers for each edge, and whether it was copied back to the original order of edges; the
        time of each module and the numbers of its regions; the gathers and reductions left to
        torch, and why; and why Inductor does not run the rest, if it was asked to. `programs()`
        returns the regions' programs, for edges in the order of their rows.

    Raises
    ------
    Exception
        Any exception of the model for these inputs.

    Examples
    --------
    >>> print(sparsetir.explain(model, x, edge_index))  # doctest: +SKIP
    """
    for original in ("_orig_mod", "_torchdynamo_orig_callable"):  # of a compiled model or function
        model = getattr(model, original, model)
    backend = Backend(noted=True)
    run = copy.deepcopy(model) if isinstance(model, torch.nn.Module) else model
    call = torch.compile(run, backend=backend)
    for _ in range(1 + RUNS):
        _run(call, run, inputs, options)
    return Explanation(backend.graphs)


def _run(call: Any, run: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Run forward, and backward if there are gradients."""
    out = call(*inputs, **options)
    results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
    wanted = [x for x in results if x.requires_grad]
    if wanted:
        leaves = [x for x in tree_leaves((inputs, options)) if _has_gradient(x)]
        if isinstance(run, torch.nn.Module):
            leaves += [p for p in run.parameters() if p.requires_grad]
        ones = [torch.ones_like(x) for x in wanted]
        # Without any, a function closes over its parameters.
        leaves = leaves or list(_leaves_of(wanted))
        torch.autograd.grad(wanted, leaves, ones, allow_unused=True)


def _leaves_of(results: list[Tensor]) -> Iterator[Tensor]:
    """The tensors at which backward of some results accumulates gradients."""
    nodes: list[Any] = [x.grad_fn for x in results]
    seen = set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        nodes += [following for following, _ in node.next_functions]


def _has_gradient(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad
