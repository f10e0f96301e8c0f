"""Time and memory of each region and operator of a running graph."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from sparsetir.graph.expressions import SAME, VIEWS, module_of
from sparsetir.graph.operator import RUNNERS, restored
from sparsetir.graph.regions import FOUND, Found


@dataclass
class Cost:
    """The cost of a node of a graph.

    direction : "forward", "backward" or "inference"
    what : the operator's name
    module : name of the module that it stems from, "" for none
    region : the region in its place, or None
    number : number of the region in its graph
    shape : shape of its first result; None if it is not a tensor
    seconds : the minimum of all runs but the first
    bytes : bytes of its results
    edges : whether a result holds several numbers for each edge of a region in the graph
    copied : whether the result was copied back to the original order of the edges
    """

    direction: str
    what: str
    module: str = ""
    region: Found | None = None
    number: int | None = None
    shape: tuple[int, ...] | None = None
    seconds: float = float("inf")
    bytes: int = 0
    edges: bool = False
    copied: bool = False


class Measured:
    """A runner that measures a graph node by node; views and numbers are left out.

    regions : the graph's regions, in the order of their numbers
    costs : costs by node, in order
    """

    def __init__(self, graph: fx.GraphModule, direction: str, regions: list[Found]) -> None:
        self._graph, self._first, self._edges = graph, True, set[int]()
        numbers = {id(region): n for n, region in enumerate(regions)}
        self.costs: dict[str, Cost] = {}
        for node in graph.graph.nodes:
            if node.op == "call_function" and node.target not in VIEWS | SAME:
                region = node.meta.get(FOUND)
                name, (module, _) = _name_of(node.target), module_of(node)
                number = numbers.get(id(region))
                self.costs[node.name] = Cost(direction, name, module, region, number)

    def __call__(self, args: list[Any]) -> Any:
        """Run the graph; empties the list of arguments, as torch expects."""
        arguments = list(args)
        args.clear()
        run = _Run(self._graph, {} if self._first else self.costs, self._edges)
        self._first = False
        return run.boxed_run(arguments)


class _Run(fx.Interpreter):
    """One measured run; the first also collects the numbers of edges of regions."""

    def __init__(self, graph: fx.GraphModule, costs: dict[str, Cost], edges: set[int]) -> None:
        super().__init__(graph)
        self._costs, self._edges = costs, edges

    def run_node(self, n: fx.Node) -> Any:
        begin = time.perf_counter()
        result = super().run_node(n)
        seconds = time.perf_counter() - begin
        target: Any = n.target
        runs_region = isinstance(target, tuple(RUNNERS.values()))
        if runs_region:
            _, (rows, *_), *_ = self.fetch_args_kwargs_from_env(n)[0]
            self._edges.add(len(rows))
        cost = self._costs.get(n.name)
        if cost is None:
            return result
        tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        cost.seconds = min(cost.seconds, seconds)
        cost.bytes = sum(x.numel() * x.element_size() for x in tensors)
        cost.shape = tuple(tensors[0].shape) if tensors else None
        cost.edges = any(_holds_edges(x, self._edges) for x in tensors)
        cost.copied = target is restored or runs_region and target.copies
        return result


def _holds_edges(x: Tensor, edges: set[int]) -> bool:
    return x.dim() > 1 and x.shape[0] in edges and x.numel() > x.shape[0]


def _name_of(target: Any) -> str:
    return str(getattr(target, "__name__", target)).removesuffix(".default")


def table(costs: list[Cost], most: int = 12) -> list[list[str]]:
    """Rows of a table: the `most` slowest nodes, and one row for the others."""
    ran = _ran(costs)
    whole = sum(c.seconds for c in ran)

    def row(cells: list[str], of: list[Cost], stored: str) -> list[str]:
        return [*cells, *_times(of, whole), f"{sum(c.bytes for c in of) / 1e6:.2f}", stored]

    rows = [["direction", "", "module", "result", "ms", "share", "MB", "edges x features"]]
    for cost in ran[:most]:
        name = cost.what if cost.number is None else f"region {cost.number}"
        stored = ", ".join(["stored"] * cost.edges + ["copied back"] * cost.copied)
        cells = [cost.direction, name, cost.module, str(cost.shape or "")]
        rows.append(row(cells, [cost], stored))
    others = ran[most:]
    for name, several in ((f"{len(others)} others", others), ("all", ran)):
        if not several:
            continue
        count = sum(c.edges for c in several)
        rows.append(row(["", name, "", ""], several, f"{count} stored" if count else ""))
    return rows


def module_table(costs: list[Cost]) -> list[list[str]]:
    """Rows of a table: each module with its regions, all of them, the slowest module first."""
    ran = _ran(costs)
    of_module: dict[str, list[Cost]] = {}
    for cost in ran:
        of_module.setdefault(cost.module, []).append(cost)
    rows = [["module", "ms", "share", "regions"]]
    for module, of in sorted(of_module.items(), key=lambda item: -sum(c.seconds for c in item[1])):
        numbers = sorted(c.number for c in of if c.number is not None)
        times = _times(of, sum(c.seconds for c in ran))
        rows.append([module or "-", *times, ", ".join(map(str, numbers))])
    return rows


def _ran(costs: list[Cost]) -> list[Cost]:
    """The nodes that ran, the slowest first."""
    return sorted((c for c in costs if c.seconds < float("inf")), key=lambda c: -c.seconds)


def _times(costs: list[Cost], whole: float) -> tuple[str, str]:
    """The time of some nodes in ms, and its share of a whole in seconds."""
    seconds = sum(c.seconds for c in costs)
    return f"{1e3 * seconds:.3f}", f"{seconds / (whole or 1.0):.0%}"
