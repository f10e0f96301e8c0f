"""Training of models: by PyG unchanged, through torch.compile, by our layers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from bench.timing import clock_of, interleaved
from sparsetir.graph.backend import Backend, backend
from sparsetir.nn import accelerate
from sparsetir.tuning.serving import one_line

OURS, PYG, INDUCTOR = "backend sparsetir", "PyG", "Inductor"
COMPILED, ACCELERATE, LAYERS = "backend, rest by Inductor", "accelerate", "sparsetir.nn"
FIRST, OFF = 3, 1e-3  # epochs whose losses are compared, and their allowed difference


class Trained:
    """A model with Adam, called in one way.

    loss : of an epoch, given the module in that way
    backend : of the way that is ours
    adam : options of Adam
    """

    def __init__(
        self, way: str, net: Any, loss: Callable[[Callable[..., Any]], Any], **adam: Any
    ) -> None:
        self.net, self.backend, self._loss = net, Backend(), loss
        options: dict[str, Any] = {
            OURS: {"backend": self.backend},
            COMPILED: {"backend": backend, "options": {"rest": "inductor"}},
            INDUCTOR: {},
        }
        self.call = torch.compile(net, **options[way]) if way in options else net
        self._around = accelerate if way == ACCELERATE else contextlib.nullcontext
        self.adam = torch.optim.Adam(net.parameters(), **adam)

    def epoch(self) -> float:
        """Take a step; returns the loss before it."""
        with self._around():
            self.adam.zero_grad()
            loss = self._loss(self.call)
            loss.backward()
            self.adam.step()
        return loss.item()


Kind = TypeVar("Kind", bound=Trained)


def begun(
    ways: Sequence[str], make: Callable[[str], Kind], cell: dict[str, Any]
) -> dict[str, Kind]:
    """Train in each way; adds first epochs' seconds, losses, and missing peers to a cell."""
    trained_by_way = {}
    cell |= {key: {} for key in ("first", "losses", "missing", "wrong")}
    for way in ways:
        # Whole graphs if Inductor accepts them, else with breaks.
        for whole in (True, False) if way == INDUCTOR else (True,):
            try:
                with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=whole):
                    trained = make(way)
                    start = time.perf_counter()
                    losses = [trained.epoch()]
            except Exception as problem:  # from a peer that does not support this
                if way == OURS:
                    raise
                cell["missing"][way] = one_line(problem)
                if way == INDUCTOR:
                    torch._dynamo.reset()  # it is the first: nothing else is compiled yet
                continue
            cell["first"][way] = time.perf_counter() - start
            cell["losses"][way] = losses + [trained.epoch() for _ in range(FIRST - 1)]
            cell["missing"].pop(way, None)
            trained_by_way[way] = trained
            break
    return trained_by_way


def epoch_times(ways: Mapping[str, Trained], seconds: float) -> dict[str, Any]:
    """Times of epochs in turns."""
    calls = {way: trained.epoch for way, trained in ways.items()}
    clock = clock_of(torch.get_num_threads())
    return interleaved(calls, seconds, least=4, warm_up=1, clock=clock)
