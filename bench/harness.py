"""What studies share: they name cells and ways; here are runs, rows of tables, files and gradients.

A study measures cells one by one (`each`), shows them, and ends with a JSON file, a picture of it,
and status 1 where a result was wrong (`finish`).
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import memory
from bench.report import circumstances, write
from bench.timing import progress

TOLERANCE = 1e-4  # in units of the terms of each sum
Call = Callable[[], Any]


def each(todo: Iterable[tuple[str, Callable[[], dict[str, Any]]]]) -> list[dict[str, Any]]:
    """The cell of each, measured while a line says which one it is."""
    found = []
    for label, measure in todo:
        progress(label)
        found.append(measure())
    progress("")
    return found


def finish(
    args: argparse.Namespace, command: str, results: Any, wrong: Any = None,
    draw: Callable[[Path], Any] | None = None, **about: Any,
) -> Path:  # fmt: skip
    """Write the JSON file, and the picture where it is asked for.

    wrong : what raises SystemExit, unless it is empty
    about : of the circumstances, beside those of each command
    """
    path = write(args.out, command, {**circumstances(args.threads), **about}, results)
    if draw is not None and args.plot:
        draw(path)
    if wrong:
        raise SystemExit(f"{command}: wrong: {wrong}")
    return path


def refuse_bad(cells: Sequence[Any], bad: Sequence[Any]) -> None:
    """End with status 1 where cells are bad; each has been told."""
    if bad:
        raise SystemExit(f"{len(bad)} of {len(cells)} cells hold wrong results or failures")


def ms(times: Mapping[str, float]) -> str:
    """Milliseconds, minimum and median."""
    return f"{1e3 * times['min']:.2f}/{1e3 * times['median']:.2f}"


def beside(
    times: Mapping[str, Any], names: Sequence[str], base: str, unit: float = 1e3,
    digits: int = 2, of: str = "min",
) -> list[str]:  # fmt: skip
    """Of a row: what ways take, and in brackets how many times as long as one of them."""
    first = times[base][of] if base in times else math.nan
    texts = []
    for name in names:
        if name not in times:
            texts.append("-")
            continue
        ratio = times[name][of] / first
        told = "" if math.isnan(ratio) else f" ({ratio:.2f})"
        texts.append(f"{unit * times[name][of]:.{digits}f}{told}")
    return texts


def geomean(values: Iterable[float]) -> float:
    """Geometric mean of some positive numbers, at least one."""
    return float(np.exp(np.mean(np.log(list(values)))))


def check(who: str, found: np.ndarray, exact: np.ndarray, unit: np.ndarray | float) -> float:
    """How far a result is off; raises SystemExit where that is too much.

    unit : the sum of the absolute values that each element is made of
    """
    error = float((np.abs(found - exact) / np.maximum(unit, 1e-9)).max(initial=0))
    if not error < TOLERANCE:  # NaN is wrong too
        raise SystemExit(f"{who} is wrong by {error}")
    return error


# -- with torch -----------------------------------------------------------------------------------


def cuda(quiet: bool = False) -> Any:
    """torch, where it is installed and finds a CUDA device; else None, and says so."""
    try:
        import torch
    except ImportError:
        torch = None
    if torch is not None and torch.cuda.is_available():
        return torch
    if not quiet:
        print("no CUDA device: skipped")
    return None


def of_gpu(torch: Any) -> dict[str, Any]:
    """What a figure of a GPU depends on beside the circumstances of each command."""
    return {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}


def inference(way: Callable[..., Any], operands: Sequence[Any]) -> Call:
    """A call without gradients."""
    import torch

    def call() -> Any:
        with torch.no_grad():
            return way(*operands)

    return call


def training(
    way: Callable[..., Any], operands: Sequence[Any], grad: Any, parameters: Iterable[Any] = ()
) -> Call:
    """A call with the gradients of operands and parameters, as of a layer between others."""
    import torch

    own = [x.clone().requires_grad_() for x in operands]
    wanted = [*own, *parameters]
    return lambda: torch.autograd.grad(way(*own), wanted, grad)


def in_a_process(function: Callable[..., Any], *given: Any) -> Any:
    """What a function of a module gives in a process of its own, where nothing was made before."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, given)


def most_bytes(call: Call) -> int:
    """The most memory that a call takes beside what the process holds."""
    memory.begin_peak()
    before = memory.held()
    call()
    return memory.peak() - before
