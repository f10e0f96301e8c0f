"""Operators beside the best that a user of this CPU could call instead."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.harness import refuse_bad
from bench.limits import Machine
from bench.peers.cases import features
from bench.peers.libraries import BEFORE, FLOAT32, OURS, PEERS
from bench.peers.turns import Worker, compare, shared
from bench.problems import Problem, chosen, problems, too_large
from bench.report import circumstances, commit, write
from bench.summary import show, summarise
from bench.timing import progress
from sparsetir.runtime.targets import usable_cpus
from sparsetir.tuning.case import make

FEATURES = (32, 128, 512)
ROUNDS, SECONDS = 9, 0.015
QUICK_ROUNDS, QUICK_SECONDS = 2, 0.002
COMPILER = ("g++", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")


def run(args: argparse.Namespace) -> None:
    """The command; status 1 if a result was wrong or a peer failed."""
    if args.target == "cuda":
        from bench.gpu import run as run_gpu

        return run_gpu(args)
    threads = thread_counts(args.threads)
    unknown = set(args.peers or ()) - set(PEERS)
    if unknown:
        raise SystemExit(f"--peers: expected {', '.join(PEERS)}, got {', '.join(unknown)}")
    if args.before and not (args.before / "python" / "sparsetir").is_dir():
        raise SystemExit(f"--before: {args.before} is no checkout of this project")
    names = [
        OURS,
        *([BEFORE] if args.before else []),
        FLOAT32,
        *(p for p in args.peers or PEERS if p not in (OURS, FLOAT32)),
    ]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sparsetir-bench-")))
        options = {"tune": "1"} if args.tune else {}
        if args.yardstick:
            options |= compiled(args.yardstick, folder)
        bench = Bench(threads, names, options, folder, args.quick, args.rounds, args.before)
        stack.callback(bench.close)
        given = problems(args.graph, args.pruned, args.layers, chosen(args.synthetic))
        cells = list(bench.cells(given, args))
        totals, peaks = bench.totals(), {m.worker.threads: m.peak for m in bench.machines}
    progress("")
    results = {
        "settings": {
            "rounds": bench.rounds, "turn_seconds": bench.seconds, "tune": args.tune,
            "peak_flops_per_second": peaks,
            **({"before": commit(args.before)} if args.before else {}),
        },
        "cells": cells, "summary": summarise(cells), "workers": totals,
        "compilations": sum(w["compilations"] for w in totals),
    }  # fmt: skip
    show(results)
    path = write(args.out, "-".join(["run", *args.op]), circumstances(threads), results)
    if args.plot:
        from bench.plot import draw

        draw(path)
    refuse_bad(cells, [c for c in cells if c.get("wrong") or c.get("failed")])


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


def compiled(source: Path, folder: Path) -> dict[str, str]:
    """The option for the yardstick: its library, or none where it does not compile."""
    path = folder / "yardstick.so"
    if not source.exists():
        raise SystemExit(f"--yardstick: {source} does not exist")
    if shutil.which(COMPILER[0]) is None:
        print(f"yardstick: no {COMPILER[0]} here")
        return {}
    command = [*COMPILER, str(source), "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"yardstick: {done.stderr.strip().splitlines()[0]}")
        return {}
    return {"yardstick": str(path)}


class Bench:
    """Workers for each peer and number of threads, and the cells that they are measured on."""

    def __init__(
        self, threads: list[int], names: list[str], options: dict[str, str], folder: Path,
        quick: bool, rounds: int | None = None, before: Path | None = None,
    ) -> None:  # fmt: skip
        self.rounds, self.seconds = (QUICK_ROUNDS, QUICK_SECONDS) if quick else (ROUNDS, SECONDS)
        self.rounds = rounds or self.rounds
        self.workers = {
            t: [Worker(n, t, options, before, ahead=True) for n in names] for t in threads
        }
        self.machines = [Machine(t, 0.02 if quick else 0.2) for t in threads]
        self.folder, self.quick, self.peers = folder, quick, len(names)

    def cells(self, given: Iterator[Problem], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
        """Measure everything, one problem at a time."""
        sizes = args.feat or ([32] if self.quick else list(FEATURES))
        for problem in given:
            reason = too_large(problem, max(sizes), self.peers)
            if reason:
                print(f"skipped: {problem.name}: {reason}")
                yield {"problem": problem.name, "class": problem.kind, "skipped": reason}
                continue
            progress(f"{problem.name}: loading")
            matrix = problem.load()
            for op in args.op:
                for feat in features(op, sizes):
                    for dtype in args.dtype:
                        yield from self._measured(problem, matrix, op, feat, dtype)

    def _measured(
        self, problem: Problem, matrix: Any, op: str, feat: int, dtype: str
    ) -> Iterator[dict[str, Any]]:
        case = make(op, matrix, feat, dtype)
        reference = shared(case, self.folder)
        for (threads, workers), machine in zip(self.workers.items(), self.machines, strict=True):
            progress(f"{problem.name}: {op}, d = {case.feat}, {dtype}, {threads} thread(s)")
            # Beside kernels of half precision, the same in float32.
            workers = [w for w in workers if w.name != FLOAT32 or dtype != "float32"]
            found = compare(case, workers, self.folder, self.rounds, self.seconds, reference)
            m, n = matrix.shape
            yield {
                "op": op, "problem": problem.name, "class": problem.kind, "m": m, "n": n,
                "nnz": int(matrix.nnz), "feat": case.feat, "dtype": dtype, "threads": threads,
                "limit": machine.limit(case), **found,
            }  # fmt: skip

    def totals(self) -> list[dict[str, Any]]:
        """What each process has used: largest memory in bytes, kernels compiled."""
        return [
            {"peer": w.name, "threads": w.threads, **w.ask("totals")}
            for workers in self.workers.values() for w in workers if w.alive
        ]  # fmt: skip

    def close(self) -> None:
        """End all processes."""
        for worker in [w for ws in self.workers.values() for w in ws]:
            worker.close()
        for machine in self.machines:
            machine.worker.close()
