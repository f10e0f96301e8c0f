"""Times from a program's text to each stage and a kernel; for calls see `calls`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import sparsetir
from bench.harness import finish
from bench.report import table
from bench.timing import interleaved, progress
from sparsetir.schedules.operators import edge_attention, spmm
from sparsetir.schedules.operators.edge_attention import EdgeAttention
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.targets import host_target


def run(args: argparse.Namespace) -> None:
    """The command."""
    programs = {"spmm": spmm.program(Spmm()), "attention": edge_attention.program(EdgeAttention())}
    results = {name: steps(func, 0.05 if args.quick else 3.0) for name, func in programs.items()}
    progress("")
    for name, took in results.items():
        rows = [
            [step, *(f"{1e3 * t[k]:.2f}" for k in ("min", "median"))] for step, t in took.items()
        ]
        table(f"{name} (ms)", ["", "min", "median"], rows)
    finish(args, "compile", results)


def steps(program: Any, seconds: float) -> dict[str, dict[str, float]]:
    """Seconds from the text to each stage, with a new function each time."""
    target, first = host_target(), partial(sparsetir.from_source, program.script())

    def second() -> Any:
        return sparsetir.default_schedule(sparsetir.lower_sparse_iter(first()), target)

    calls: dict[str, Callable[[], Any]] = {
        "stage I": first,
        "stage II": lambda: sparsetir.lower_sparse_iter(first()),
        "stage II, scheduled": second,
        "stage III": lambda: sparsetir.lower_sparse_buffer(second()),
        "kernel": lambda: sparsetir.build(first(), target),
    }
    times = {}
    for name, call in calls.items():
        progress(f"{program.name}: {name}")
        times |= interleaved({name: call}, seconds, least=2)
    return times
