"""Operators beside the best alternatives for a user of this CPU."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

from bench import plots
from bench.harness import finish, refuse_bad
from bench.peers.cases import Case, make, save
from bench.peers.gpu import Gpu
from bench.peers.libraries import BEFORE, FLOAT32, OURS, PEERS
from bench.peers.turns import Worker, compare
from bench.problems import Problem, problems
from bench.report import commit
from bench.summary import show, summarise
from bench.timing import progress
from sparsetir.machine import this_machine
from sparsetir.schedules.operators.registry import OPERATORS

FEATURES = (32, 128, 512)
ROUNDS, SECONDS = 9, 0.015
QUICK = 2, 0.002


def run(args: argparse.Namespace) -> None:
    """The command; status 1 if a result was wrong or a peer failed."""
    with ExitStack() as stack:
        measuring = Gpu.of(args) if args.target == "cuda" else Processes(args, stack)
        if measuring is None:
            return
        graphs = problems(args.graph, args.pruned, args.layers)
        cells = list(measured(graphs, args, measuring))
    progress("")
    results = {"settings": measuring.settings, "cells": cells, "summary": summarise(cells)}
    show(results)
    finish(args, "-".join(["run", *args.op]), results, draw=plots.speed_ups)
    refuse_bad(cells)


def measured(
    graphs: Iterator[Problem], args: argparse.Namespace, measuring: Any
) -> Iterator[dict[str, Any]]:
    """Measure everything, one problem at a time."""
    sizes = args.feat or ([32] if args.quick else list(FEATURES))
    for problem in graphs:
        about = {"problem": problem.name, "class": problem.kind}
        progress(f"{problem.name}: loading")
        matrix = problem.load()
        about |= {"m": matrix.shape[0], "n": matrix.shape[1], "nnz": int(matrix.nnz)}
        for op, dtype in product(args.op, args.dtype):
            for feat in [1] if OPERATORS[op].vectors else sizes:
                progress(f"{problem.name}: {op}, d = {feat}, {dtype}")
                case = make(op, matrix, feat, dtype)
                for cell in measuring.measured(case):
                    yield {"op": op, **about, "feat": case.feat, "dtype": dtype, **cell}


def thread_counts(words: list[str] | None) -> list[int]:
    """Numbers of threads from "all", "one" and numbers; "all and one" by default."""
    cores = len(this_machine().cpus)
    named = {"all": cores, "one": 1}
    counts = []
    for word in " ".join(words or ["all", "one"]).split():
        if word == "and":
            continue
        if word not in named and not (word.isdigit() and int(word) > 0):
            raise SystemExit(f"--threads: expected all, one or numbers, got {word}")
        counts.append(named.get(word) or int(word))
    return list(dict.fromkeys(counts))


class Processes:
    """Workers for each peer and number of threads, which are measured in turns."""

    def __init__(self, args: argparse.Namespace, stack: ExitStack) -> None:
        """Create them from the command line, whose errors raise SystemExit."""
        args.threads = thread_counts(args.threads)
        unknown = set(args.peers or ()) - set(PEERS)
        if unknown:
            raise SystemExit(f"--peers: expected {', '.join(PEERS)}, got {', '.join(unknown)}")
        if args.before and not (args.before / "python" / "sparsetir").is_dir():
            raise SystemExit(f"--before: {args.before} is no checkout of this project")
        folder = tempfile.TemporaryDirectory(prefix="sparsetir-bench-")
        self.folder = Path(stack.enter_context(folder))
        rounds, self.seconds = QUICK if args.quick else (ROUNDS, SECONDS)
        self.rounds = args.rounds or rounds
        self.settings = {"rounds": self.rounds, "turn_seconds": self.seconds}
        if args.before:
            self.settings["before"] = commit(args.before)
        others = (p for p in args.peers or PEERS if p not in (OURS, FLOAT32))
        names = [OURS, *[BEFORE] * bool(args.before), FLOAT32, *others]
        modules = getattr(args, "modules", None) or ()
        self.workers = {
            t: [Worker(n, t, args.before, modules) for n in names] for t in args.threads
        }
        for worker in (w for workers in self.workers.values() for w in workers):
            stack.callback(worker.close)

    def measured(self, case: Case) -> Iterator[dict[str, Any]]:
        """A cell for each number of threads."""
        save(case, self.folder)
        reference = case.check()
        for threads, workers in self.workers.items():
            # Besides half-precision kernels, the same in float32.
            workers = [w for w in workers if w.name != FLOAT32 or case.dtype != "float32"]
            cell = compare(case, workers, self.folder, self.rounds, self.seconds, reference)
            yield {"threads": threads, **cell}
