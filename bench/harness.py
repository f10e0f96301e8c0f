"""Runs, checks, files and exit status of commands, which name cells and ways.

A command measures cells one by one (`measure_each`), shows them, and ends with a JSON file, a
picture of it, and status 1 if a result was wrong (`finish`). For ways in torch see `ways`.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.report import circumstances, write
from bench.timing import progress

TOLERANCE = 1e-4  # in units of the terms of each sum


def measure_each(
    todo: Iterable[tuple[str, Callable[[], dict[str, Any]]]],
    save: Callable[[list[dict[str, Any]]], Any] = lambda cells: None,
) -> list[dict[str, Any]]:
    """Measure each cell, and print which one is being measured.

    save : called with the cells so far after each, for a machine that may go away
    """
    cells = []
    for label, measure in todo:
        progress(label)
        cells.append(measure())
        save(cells)
    progress("")
    return cells


def circumstances_of(args: argparse.Namespace) -> dict[str, Any]:
    """The circumstances of a command; on a GPU those of the GPU too."""
    if getattr(args, "target", "cpu") != "cuda":
        return circumstances(args.threads)
    import torch

    gpu = {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return {**circumstances(1), **gpu}


def finish(
    args: argparse.Namespace,
    command: str,
    results: Any,
    draw: Callable[[Path], Any] | None = None,
    **about: Any,
) -> None:
    """Write the JSON file, and the picture if requested.

    about : circumstances besides those of each command
    """
    path = write(args.out, command, {**circumstances_of(args), **about}, results)
    if draw is not None and args.plot:
        draw(path)


def refuse_bad(cells: Sequence[dict[str, Any]], ours: str = "") -> None:
    """End with status 1 if cells hold wrong results or failures; each has been reported.

    ours : the way that may not be missing
    """
    if bad := [
        c for c in cells if c.get("wrong") or c.get("failed") or ours in c.get("missing", ())
    ]:
        raise SystemExit(f"{len(bad)} of {len(cells)} cells hold wrong results or failures")


def run_cells(
    args: argparse.Namespace,
    command: str,
    todo: Iterable[tuple[str, Callable[[], dict[str, Any]]]],
    show: Callable[[list[dict[str, Any]]], Any],
    draw: Callable[[Path], Any] | None = None,
    ours: str = "",
    **results: Any,
) -> None:
    """Run a command: its cells one by one, saved after each, as a machine may go away.

    results : other contents of the file
    """
    about = circumstances_of(args)
    cells = measure_each(
        todo, lambda so_far: write(args.out, command, about, {"cells": so_far, **results}, True)
    )
    show(cells)
    finish(args, command, {"cells": cells, **results}, draw)
    refuse_bad(cells, ours)


def chosen(command: str, only: Sequence[str] | None, names: Iterable[str]) -> list[str]:
    """The steps of a command that `--only` names, or all; SystemExit for an unknown one."""
    names = list(names)
    if unknown := sorted(set(only or ()) - set(names)):
        expected = f"expected some of {', '.join(names)}, got {', '.join(unknown)}"
        raise SystemExit(f"{command}: argument '--only': {expected}")
    return list(only or names)


def check(name: str, result: np.ndarray, exact: np.ndarray, unit: np.ndarray | float) -> float:
    """The error of a result; raises SystemExit if it is too large.

    unit : the sum of the absolute values of each element's terms
    """
    error = float((np.abs(result - exact) / np.maximum(unit, 1e-9)).max(initial=0))
    if not error < TOLERANCE:  # NaN is wrong too
        raise SystemExit(f"{name} is wrong by {error}")
    return error


def cuda() -> Any:
    """Return torch if it is installed and finds a CUDA device; else print so and return None."""
    try:
        import torch
    except ImportError:
        torch = None
    if torch is not None and torch.cuda.is_available():
        return torch
    print("no CUDA device: skipped")
    return None


def in_a_process(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of a module in a new process, without earlier state."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)
