"""Operators beside the best that a user of this CPU could call instead."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

from bench.gpu import OnGpu
from bench.harness import finish, refuse_bad
from bench.machine import Machine
from bench.peers.cases import features
from bench.peers.libraries import BEFORE, FLOAT32, OURS, PEERS
from bench.peers.turns import Worker, compare, shared
from bench.problems import Problem, chosen, problems, too_large
from bench.report import commit
from bench.summary import show, summarise
from bench.timing import progress
from sparsetir.runtime.targets import usable_cpus
from sparsetir.tuning.case import Case, make

FEATURES = (32, 128, 512)
ROUNDS, SECONDS = 9, 0.015
QUICK_ROUNDS, QUICK_SECONDS = 2, 0.002


def run(args: argparse.Namespace) -> None:
    """The command; status 1 if a result was wrong or a peer failed."""
    with ExitStack() as stack:
        measuring = OnGpu.of(args) if args.target == "cuda" else Processes.of(args, stack)
        if measuring is None:
            return
        stack.callback(measuring.close)
        given = problems(args.graph, args.pruned, args.layers, chosen(args.synthetic))
        cells = list(measured(given, args, measuring))
        about = measuring.about()
    progress("")
    results = {**about, "cells": cells, "summary": summarise(cells)}
    show(results)
    path = finish(args, "-".join(["run", *args.op]), results)
    if args.plot:
        from bench.plot import draw

        draw(path)
    refuse_bad(cells, [c for c in cells if c.get("wrong") or c.get("failed")])


def measured(
    given: Iterator[Problem], args: argparse.Namespace, measuring: Any
) -> Iterator[dict[str, Any]]:
    """Measure everything, one problem at a time."""
    sizes = args.feat or ([32] if args.quick else list(FEATURES))
    for problem in given:
        about = {"problem": problem.name, "class": problem.kind}
        if reason := too_large(problem, max(sizes), measuring.many):
            print(f"skipped: {problem.name}: {reason}")
            yield {**about, "skipped": reason}
            continue
        progress(f"{problem.name}: loading")
        matrix = problem.load()
        about |= {"m": matrix.shape[0], "n": matrix.shape[1], "nnz": int(matrix.nnz)}
        for op, dtype in product(args.op, args.dtype):
            for feat in features(op, sizes):
                progress(f"{problem.name}: {op}, d = {feat}, {dtype}")
                case = make(op, matrix, feat, dtype)
                for cell in measuring.measured(case):
                    yield {"op": op, **about, "feat": case.feat, "dtype": dtype, **cell}


def thread_counts(words: list[str] | None) -> list[int]:
    """Numbers of threads from "all", "one" and numbers; "all and one" by default."""
    cores = len(usable_cpus())
    named = {"all": cores, "one": 1}
    found = []
    for word in " ".join(words or ["all", "one"]).split():
        if word == "and":
            continue
        if word not in named and not (word.isdigit() and int(word) > 0):
            raise SystemExit(f"--threads: expected all, one or numbers, got {word}")
        found.append(named.get(word) or int(word))
    return list(dict.fromkeys(found))


class Processes:
    """Workers for each peer and number of threads, which are measured in turns.

    options : of the workers
    """

    def __init__(
        self, args: argparse.Namespace, threads: list[int], options: dict[str, str], folder: Path
    ) -> None:
        self.rounds, self.seconds = (ROUNDS, SECONDS)
        if args.quick:
            self.rounds, self.seconds = QUICK_ROUNDS, QUICK_SECONDS
        self.rounds = args.rounds or self.rounds
        before = [BEFORE] if args.before else []
        others = (p for p in args.peers or PEERS if p not in (OURS, FLOAT32))
        names = [OURS, *before, FLOAT32, *others]
        self.workers = {
            t: [Worker(n, t, options, args.before, ahead=True) for n in names] for t in threads
        }
        self.machines = {t: Machine(t, 0.02 if args.quick else 0.2) for t in threads}
        self.args, self.folder, self.many = args, folder, len(names)

    @classmethod
    def of(cls, args: argparse.Namespace, stack: ExitStack) -> Processes:
        """By the command line, whose faults raise SystemExit."""
        args.threads = thread_counts(args.threads)
        unknown = set(args.peers or ()) - set(PEERS)
        if unknown:
            raise SystemExit(f"--peers: expected {', '.join(PEERS)}, got {', '.join(unknown)}")
        if args.before and not (args.before / "python" / "sparsetir").is_dir():
            raise SystemExit(f"--before: {args.before} is no checkout of this project")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sparsetir-bench-")))
        options = {"tune": "1"} if args.tune else {}
        return cls(args, args.threads, options, folder)

    def measured(self, case: Case) -> Iterator[dict[str, Any]]:
        """A cell for each number of threads."""
        reference = shared(case, self.folder)
        for threads, workers in self.workers.items():
            # Beside kernels of half precision, the same in float32.
            workers = [w for w in workers if w.name != FLOAT32 or case.dtype != "float32"]
            found = compare(case, workers, self.folder, self.rounds, self.seconds, reference)
            yield {"threads": threads, "limit": self.machines[threads].limit(case), **found}

    def about(self) -> dict[str, Any]:
        """Settings, and what processes have used: largest memory in bytes, kernels compiled."""
        settings = {"rounds": self.rounds, "turn_seconds": self.seconds, "tune": self.args.tune}
        settings["peak_flops_per_second"] = {t: m.peak for t, m in self.machines.items()}
        if self.args.before:
            settings["before"] = commit(self.args.before)
        alive = [w for workers in self.workers.values() for w in workers if w.alive]
        used = [{"peer": w.name, "threads": w.threads, **w.ask("totals")} for w in alive]
        compilations = sum(w["compilations"] for w in used)
        return {"settings": settings, "workers": used, "compilations": compilations}

    def close(self) -> None:
        """End all processes."""
        for worker in [w for ws in self.workers.values() for w in ws]:
            worker.close()
        for machine in self.machines.values():
            machine.worker.close()
