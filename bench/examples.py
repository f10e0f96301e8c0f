"""Models of PyG's list of examples, trained as they are and through the backend: scores, epochs."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.harness import each, finish
from bench.report import MS, beside, circumstances, table, write
from bench.tasks import EXAMPLES, Call, Example, Task
from bench.timing import clock_of, interleaved
from sparsetir.graph.backend import Backend

OURS, PYG, INDUCTOR = "backend sparsetir", "PyG", "Inductor"
FIRST, OFF = 3, 1e-3  # epochs whose losses are compared, and by how much they may differ
NOISE = 0.015  # by which the mean scores may differ


def run(args: argparse.Namespace) -> None:
    """The command; status 1 where losses or scores are wrong."""
    torch.set_num_threads(args.threads)
    torch._dynamo.config.cache_size_limit = 256
    todo = args.model or (["jumping knowledge"] if args.quick else list(EXAMPLES))
    seeds, epochs = (1, 3) if args.quick else (args.seeds, None)
    ways = [w for w in (INDUCTOR, OURS, PYG) if args.peers is None or w in (OURS, PYG, *args.peers)]
    about = {"clock": clock_of(args.threads).__name__, "seeds": seeds}
    seconds = 0.1 if args.quick else args.seconds
    measured = ((name, partial(measure, name, ways, seeds, epochs, seconds)) for name in todo)
    save = lambda cells: write(  # noqa: E731
        args.out, "examples", circumstances(args.threads), {"cells": cells, **about}, quiet=True
    )
    cells = each(measured, save)
    show(cells)
    finish(args, "examples", {"cells": cells, **about}, [c for c in cells if c["wrong"]])


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


class Training:
    """A task that is trained in a way."""

    def __init__(self, example: Example, way: str) -> None:
        self.example, self.backend = example, Backend()
        self.task: Task = example.make()
        self.call: Call = self.task.net
        if way != PYG:
            self.call = torch.compile(
                self.call, backend=self.backend if way == OURS else "inductor"
            )
        self.begin(0)

    def begin(self, number: int) -> None:
        """Have the parameters of a seed."""
        seed(number)
        self.task.net.load_state_dict(self.example.make().net.state_dict())
        rate, decay = self.example.rate, self.example.decay
        self._adam = torch.optim.Adam(self.task.net.parameters(), rate, weight_decay=decay)

    def epoch(self) -> float:
        """The loss before a step."""
        self.task.net.train()
        self._adam.zero_grad()
        loss = self.task.loss(self.call)
        loss.backward()
        self._adam.step()
        return loss.item()

    def score(self) -> float:
        self.task.net.eval()
        seed(0)
        with torch.no_grad():
            return self.task.score(self.call)


def measure(
    name: str, ways: list[str], seeds: int, epochs: int | None, seconds: float
) -> dict[str, Any]:
    """Scores by way and seed, losses of the first epochs, and times of epochs."""
    torch._dynamo.reset()
    example = EXAMPLES[name]
    epochs = epochs or example.epochs
    cell: dict[str, Any] = {
        "model": name, "epochs": epochs, "first": {}, "losses": {}, "scores": {}, "missing": {},
        "wrong": {},
    }  # fmt: skip
    steps: dict[str, Callable[[], float]] = {}
    for way in ways:
        try:
            training = Training(example, way)
            start = time.perf_counter()
            first = training.epoch()
            cell["first"][way] = time.perf_counter() - start
            cell["losses"][way] = [first, *(training.epoch() for _ in range(FIRST - 1))]
        except Exception as problem:  # of a peer that does not take this
            if way == OURS:
                raise
            cell["missing"][way] = str(problem).splitlines()[0][:200]
            continue
        steps[way] = training.epoch
        if way == INDUCTOR:
            continue
        cell["scores"][way] = []
        for number in range(seeds):
            training.begin(number)
            for _ in range(epochs):
                training.epoch()
            cell["scores"][way].append(training.score())
        if way == OURS:
            graphs = training.backend.graphs
            cell["regions"] = sum(len(g.found) for g in graphs)
            cell["left"] = [x for g in graphs for x in g.left]
    found, exact = (cell["losses"][way] for way in (OURS, PYG))  # Inductor draws other numbers
    if not np.allclose(found, exact, rtol=OFF):
        cell["wrong"]["losses"] = f"{found}, not {exact}"
    means = {way: statistics.mean(found) for way, found in cell["scores"].items()}
    if seeds > 1 and abs(means[OURS] - means[PYG]) > NOISE:
        cell["wrong"]["scores"] = f"{means}"
    clock = clock_of(torch.get_num_threads())
    cell["epoch"] = interleaved(steps, seconds, least=4, warm_up=1, clock=clock)
    return cell


def show(cells: list[dict[str, Any]]) -> None:
    """Scores, and a table of epochs."""
    ways = [OURS, PYG, INDUCTOR]
    rows = []
    for c in cells:
        scores = [
            f"{100 * statistics.mean(c['scores'][w]):.1f} +- "
            f"{100 * statistics.pstdev(c['scores'][w]):.1f}"
            for w in (PYG, OURS)
        ]
        rows.append([c["model"], *scores, *beside(c["epoch"], ways, OURS, MS)])
    table("models", ["model", "score, PyG", "score, ours", *ways], rows)
    for c in cells:
        for what, why in {**c["missing"], **c["wrong"]}.items():
            print(f"{c['model']}: {what}: {why}")
        for line in c["left"]:
            print(f"{c['model']}: left: {line}")
