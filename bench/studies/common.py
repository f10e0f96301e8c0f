"""What studies share: where they run, how far they are, what they write."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

from bench import harness
from bench.peers.gpu_clock import Clock, take_turns
from bench.timing import interleaved, progress

BAR = 20  # characters
NO_GPU = "no CUDA device: GPU times are absent"
ROUNDS = 10  # calls of a kernel on a GPU


class Steps:
    """A bar that says how much of the work is done; call it before each step."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0

    def __call__(self, label: str) -> None:
        filled = BAR * self._done // max(1, self._total)
        bar = "#" * filled + "." * (BAR - filled)
        progress(f"[{bar}] {self._done} of {self._total}: {label}")
        self._done += 1


def cuda() -> Any:
    """torch, where it is installed and finds a CUDA device, else None."""
    return harness.cuda(quiet=True)


def device(args: argparse.Namespace) -> Any:
    """torch if the study is to run on a GPU, None if on a CPU.

    Raises SystemExit where a GPU is asked for and there is none.
    """
    torch = None if args.target == "cpu" else cuda()
    if torch is None and args.target == "cuda":
        raise SystemExit(f"study {args.study}: {NO_GPU}")
    if torch is None and args.target is None:
        print(NO_GPU)
    return torch


def finish(args: argparse.Namespace, what: str, results: dict[str, Any], torch: Any = None) -> Path:
    """Write the JSON file of a study.

    what : "times" or "counts"; torch : that of the GPU which times are of
    """
    progress("")
    name = f"study-{args.study}" + ("-counts" if what == "counts" else "")
    about = {"what": what, "gpu_times": "here" if torch is not None else "absent"}
    where = {} if torch is None else harness.of_gpu(torch)
    return harness.finish(args, name, {**about, **results}, **where)


def on_gpu(torch: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a kernel, arrays as tensors on the GPU."""
    return {
        name: torch.from_numpy(value).cuda() if isinstance(value, np.ndarray) else value
        for name, value in arguments.items()
    }


def ready(torch: Any, kernel: Any, there: Mapping[str, Any]) -> Callable[[], Any]:
    """A call of a kernel alone, without the checks of each call.

    there : all its arguments but computed ones, as `on_gpu` gives them
    """
    values = {**there, **on_gpu(torch, kernel.compute(there))}
    ordered = [values[p.name] for p in kernel.signature.func.params]
    arrays = [tvm_ffi.from_dlpack(v) if hasattr(v, "shape") else v for v in ordered]
    return partial(kernel.run_unchecked, arrays)


def gpu_seconds(
    clock: Clock, calls: Mapping[str, Callable[[], Any]], rounds: int = ROUNDS
) -> dict[str, dict[str, float]]:
    """Minimum and median in seconds of calls that take turns, nothing of theirs in the caches."""
    ways = {name: lambda copy, call=call: call() for name, call in calls.items()}
    return take_turns(clock, ways, rounds, calls=1, copies=1)


def cpu_seconds(
    kernels: Mapping[str, Any], matrix: Any, b: np.ndarray, seconds: float
) -> dict[str, dict[str, float]]:
    """The same of kernels of SpMM on the CPU, each of which is checked before.

    kernels : called with (values, b, c, indptr, indices)
    matrix : CSR
    seconds : for all of them together
    """
    exact = matrix.astype("float64") @ b
    unit = abs(matrix).astype("float64") @ np.abs(b)
    calls = {}
    for way, kernel in kernels.items():
        c = np.full(exact.shape, np.nan, "float32")
        given = (matrix.data, b, c, matrix.indptr, matrix.indices)
        call = partial(kernel, *map(tvm_ffi.from_dlpack, given))
        call()
        check(way, c, exact, unit)
        calls[way] = call
    return interleaved(calls, seconds)


def check(who: str, found: np.ndarray, exact: np.ndarray, unit: np.ndarray) -> None:
    """Raise SystemExit for a wrong result, as `harness.check`."""
    harness.check(f"study: {who}", found, exact, unit)
