"""Searches of schedules for the regions of a model: `sparsetir.tune(model, *inputs)`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sparsetir.graph.calls import TARGET
from sparsetir.graph.explain import explain
from sparsetir.planning.request import default_threads
from sparsetir.runtime.texts import aligned
from sparsetir.schedules.targets import resolve_target
from sparsetir.tuning.search import tune
from sparsetir.tuning.sought import choices_of
from sparsetir.tuning.tuned import TunedProgram

LEAST = 0.02  # share of the total time, below which a region is not searched


@dataclass(frozen=True)
class TunedRegion:
    """A region of a model, and the search for it.

    Parameters
    ----------
    graph, number : int
        Numbers of torch's graph and of the region in it, as in :func:`sparsetir.explain`.
    share : float
        The region's share of the time of all regions and operators, before tuning.
    tuned : TunedProgram or None
        The result; None if its program leaves nothing to choose.
    """

    graph: int
    number: int
    share: float
    tuned: TunedProgram | None


@dataclass(frozen=True)
class TunedModel:
    """The result of :func:`sparsetir.tune` for a model; `print` shows a table.

    Models compiled later, on the same edges and sizes, use the results from the records.

    Parameters
    ----------
    regions : list of TunedRegion
        The searched regions, the slowest first.
    """

    regions: list[TunedRegion] = field(default_factory=list)

    def __str__(self) -> str:
        rows = [["graph", "region", "share", "default ms", "best ms", "speedup"]]
        for x in self.regions:
            row = [str(x.graph), str(x.number), f"{x.share:.0%}"]
            if x.tuned is None:
                rows.append([*row, "", "", "nothing to choose"])
                continue
            default, best = x.tuned.default_seconds, x.tuned.best.outcome.seconds
            times = (f"{1e3 * t:.3f}" if t is not None else "" for t in (default, best))
            rows.append([*row, *times, f"{x.tuned.speedup:.2f}" if x.tuned.speedup else ""])
        return "\n".join(aligned(rows))

    __repr__ = __str__


def tune_model(model: torch.nn.Module, inputs: Sequence[Any], **options: Any) -> TunedModel:
    """Search schedules for the slowest regions of a model; see `sparsetir.tune`.

    options : options of :func:`sparsetir.tune`; `trials` and `seconds` are for each region
    """
    explanation = explain(model, *inputs)
    costs = [
        (n, graph, cost)
        for n, graph in enumerate(explanation.graphs)
        for measured in graph.measured
        for cost in measured.costs.values()
        if graph.calls and cost.seconds < float("inf")  # regions of edges, and what has run
    ]
    whole = sum(cost.seconds for *_, cost in costs)
    result, searched = TunedModel(), set[Any]()
    for n, graph, cost in sorted(costs, key=lambda each: -each[-1].seconds):
        if cost.number is None or cost.seconds < LEAST * whole:
            continue
        call = graph.call(cost.number)
        alike = call.text, *sorted(call.shapes.items())
        if alike in searched:
            continue
        searched.add(alike)
        function, arguments = call.function, call.arguments
        some = choices_of(function, arguments, resolve_target(TARGET), default_threads())
        tuned = tune(function, arguments, **options) if some else None
        result.regions.append(TunedRegion(n, cost.number, cost.seconds / whole, tuned))
        if tuned is not None and tuned.interrupted:
            break
    return result
