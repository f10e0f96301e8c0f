"""Models of PyG's list of examples, trained unchanged and through the backend: scores, epochs."""

from __future__ import annotations

import argparse
import copy
import random
import statistics
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.harness import run_cells
from bench.report import show_others, show_times
from bench.tasks import EXAMPLES, Example
from bench.timing import clock_of
from bench.training import INDUCTOR, OFF, OURS, PYG, Trained, begun, epoch_times

NOISE = 0.015  # the allowed difference of mean scores


def run(args: argparse.Namespace) -> None:
    """The command; status 1 if losses or scores are wrong."""
    torch.set_num_threads(args.threads)
    torch._dynamo.config.cache_size_limit = 256
    todo = args.model or (["jumping knowledge"] if args.quick else list(EXAMPLES))
    seeds, epochs = (1, 3) if args.quick else (args.seeds, None)
    ways = [w for w in (INDUCTOR, OURS, PYG) if args.peers is None or w in (OURS, PYG, *args.peers)]
    options = ways, seeds, epochs, 0.1 if args.quick else args.seconds
    cells = ((name, partial(measure, name, *options)) for name in todo)
    clock = clock_of(args.threads).__name__
    run_cells(args, "examples", cells, show, clock=clock, seeds=seeds)


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


class Training(Trained):
    """A task that is trained in one way."""

    def __init__(self, example: Example, way: str) -> None:
        self.example, self.task = example, example.make()
        adam = {"lr": example.rate, "weight_decay": example.decay}
        super().__init__(way, self.task.net, self.task.loss, **adam)
        self._new = copy.deepcopy(self.adam.state_dict())  # the state of Adam before any step
        self.begin(0)

    def begin(self, number: int) -> None:
        """Reset parameters and Adam to those of a seed."""
        seed(number)
        self.net.load_state_dict(self.example.make().net.state_dict())
        self.adam.load_state_dict(self._new)

    def epoch(self) -> float:
        """Take a step; returns the loss before it."""
        self.net.train()
        return super().epoch()

    def score(self) -> float:
        """The score of the task."""
        self.net.eval()
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
    cell: dict[str, Any] = {"model": name, "epochs": epochs, "scores": {}}
    trained = begun(ways, lambda way: Training(example, way), cell)
    for way in (w for w in trained if w != INDUCTOR):
        cell["scores"][way] = []
        for number in range(seeds):
            trained[way].begin(number)
            for _ in range(epochs):
                trained[way].epoch()
            cell["scores"][way].append(trained[way].score())
    graphs = trained[OURS].backend.graphs
    cell["regions"] = sum(len(g.found) for g in graphs)
    cell["left"] = [x for g in graphs for x in g.left]
    losses, exact = (cell["losses"][way] for way in (OURS, PYG))  # Inductor draws other numbers
    if not np.allclose(losses, exact, rtol=OFF):
        cell["wrong"]["losses"] = f"{losses}, not {exact}"
    means = {way: statistics.mean(scores) for way, scores in cell["scores"].items()}
    if seeds > 1 and abs(means[OURS] - means[PYG]) > NOISE:
        cell["wrong"]["scores"] = f"{means}"
    return {**cell, "epoch": epoch_times(trained, seconds)}


def show(cells: list[dict[str, Any]]) -> None:
    """Print scores, a table of epochs, and the parts left to torch."""

    def score(cell: dict[str, Any], way: str) -> str:
        scores = [100 * x for x in cell["scores"][way]]
        return f"{statistics.mean(scores):.1f} +- {statistics.pstdev(scores):.1f}"

    about = {"model": lambda c: c["model"], "score, PyG": lambda c: score(c, PYG)}
    about["score, ours"] = lambda c: score(c, OURS)
    show_times("models", cells, "epoch", about, OURS)
    show_others(cells, lambda c: c["model"])
    for c in cells:
        for line in c["left"]:
            print(f"{c['model']}: left: {line}")
