"""Times of imports and of compilation; `calls` has those of calls."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import sparsetir
from bench.harness import finish
from bench.report import table
from bench.timing import in_turns, interleaved, progress
from sparsetir.schedules.operators import edge_attention, spmm
from sparsetir.schedules.operators.edge_attention import EdgeAttention
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.targets import host_target

IMPORT = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"


def run(args: argparse.Namespace) -> None:
    """The command."""
    seconds = 0.05 if args.quick else 3.0
    results = {
        "import": imports(1 if args.quick else 9),
        "spmm": stages(spmm.program(Spmm()), seconds),
        "attention": {} if args.quick else stages(edge_attention.program(EdgeAttention()), seconds),
    }
    progress("")
    for part, took in results.items():
        rows = [
            [name, *(f"{1e3 * t[k]:.2f}" for k in ("min", "median"))] for name, t in took.items()
        ]
        table(f"{part} (ms)", ["", "min", "median"], rows)
    finish(args, "compile", results)


def imports(rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of an import in a fresh process, after one that fills the file cache."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}

    def step(name: str) -> float:
        progress(f"import {name}")
        command = [sys.executable, "-c", IMPORT.format(name)]
        return float(subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE).stdout)

    return in_turns({n: partial(step, n) for n in ("tvm", "sparsetir")}, 0, rounds, warm_up=1)


def stages(first: Any, seconds: float) -> dict[str, dict[str, float]]:
    """Seconds of each step from text to a kernel."""
    target, script = host_target(), first.script()
    second = sparsetir.lower_sparse_iter(first)
    scheduled = sparsetir.default_schedule(second, target)
    steps: dict[str, Callable[[], Any]] = {
        "parse": lambda: sparsetir.from_source(script),
        "stage I to II": lambda: sparsetir.lower_sparse_iter(first),
        "default schedule": lambda: sparsetir.default_schedule(second, target),
        "stage II to III": lambda: sparsetir.lower_sparse_buffer(scheduled),
        "build (all from stage I)": lambda: sparsetir.build(first, target),
    }
    found = {}
    for name, step in steps.items():
        progress(f"{first.name}: {name}")
        found |= interleaved({name: step}, seconds, least=2)
    return found
