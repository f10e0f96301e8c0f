"""MTTKRP by the schedules of Senanayake's thesis, beside loop nests in C++ and scipy."""

from __future__ import annotations

import argparse
import ctypes
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

import sparsetir
from bench.harness import run_cells
from bench.report import ROOT, Form, show_means, show_times
from bench.timing import in_turns, timed
from sparsetir import Schedule
from sparsetir.data.graphs import GraphError
from sparsetir.tuning.process import raise_priority
from sparsetir.tuning.timing import turn

COMPILER = ("g++", "-O3", "-march=native", "-std=c++17", "-shared", "-fPIC")
SOURCE = Path(__file__).with_name("mttkrp.cpp")
NESTS = ("c++ constant", "c++ variable", "c++ registers")
TURN = 0.003  # seconds, and at least three calls
Calls = dict[str, Callable[[], Any]]


def run(args: argparse.Namespace) -> None:
    """The command; status 1 if a result was wrong."""
    sys.path.append(str(ROOT / "examples"))
    thesis, inputs = (import_module(f"thesis_{name}") for name in ("schedules", "inputs"))
    tensors = [(path.stem, *_tensor(path)) for path in args.tensor] or [_random()]
    raise_priority()
    rounds, kernels = 2 if args.quick else args.rounds, {}

    def cell(name: str, shape: tuple[int, ...], coords: Any, dtype: str, mode: int) -> Any:
        axes = [mode, *(n for n in range(len(shape)) if n != mode)]
        shaped, rng = tuple(shape[n] for n in axes), np.random.default_rng(0)
        arguments = inputs.mttkrp_arguments(coords[axes], shaped, dtype, "int32", rng)
        about = {"tensor": name, "mode": mode, "dtype": dtype, "nnz": coords.shape[1]}
        times = measure((thesis, inputs), kernels, nests, arguments, rounds)
        return {**about, "shape": shaped, **times}

    with tempfile.TemporaryDirectory(prefix="sparsetir-bench-") as folder:
        nests = _compiled(Path(folder))
        todo = [
            (f"{tensor[0]}, mode {mode}, {dtype}", partial(cell, *tensor, dtype, mode))
            for tensor, dtype in product(tensors, args.dtype)
            for mode in range(len(tensor[1]))
        ]
        run_cells(args, "mttkrp", todo, _show, rounds=rounds)


def measure(
    examples: tuple[Any, Any],
    kernels: dict[Any, Any],
    nests: Any,
    arguments: tuple[Any, Any],
    rounds: int,
) -> dict[str, Any]:
    """Shortest times in seconds, the best config, the chosen one, and wrong results.

    The best config is selected in separate rounds, so that it has no advantage by luck.
    """
    (thesis, inputs), (args, exact) = examples, arguments
    order, dtype = sum(name in args for name in "cdef") + 1, str(args["b"].dtype)
    program = partial(getattr(thesis, f"mttkrp{order}"), dtype)

    def kernel(key: Any, schedule: Callable[[Schedule], None] | None) -> Any:
        if (order, dtype, key) not in kernels:
            sch = Schedule(program())
            if schedule is not None:
                schedule(sch)
            kernels[order, dtype, key] = sparsetir.build(sch)
        return _ready(kernels[order, dtype, key], {**args, **inputs.mttkrp_sizes(args)})

    space = thesis.Tuned.space(order)
    tuned = {c: kernel(c, partial(thesis.tuned_mttkrp, config=c)) for c in space}
    appendix = {3: thesis.a5_mttkrp3, 4: thesis.a6_mttkrp4, 5: thesis.a7_mttkrp5}[order]
    chosen = thesis.Tuned.for_counts([len(args[f"{k}_idx"]) for k in "klmn"[: order - 1]])
    calls: Calls = {"chosen": tuned[chosen], "default": kernel("default", None)}
    calls["thesis"] = kernel("thesis", appendix)
    scipy = inputs.mttkrp_scipy(args)
    if nests is not None:
        calls |= {name: _nest(nests, how, order, args) for how, name in enumerate(NESTS)}
    wrong = [str(n) for n, call in {**tuned, **calls}.items() if not _right(call, args["a"], exact)]
    if not np.allclose(scipy(), exact, rtol=1e-3, atol=1e-3):
        wrong.append("scipy")
    sweep = shortest(tuned, max(2, rounds // 3))
    config = min(space, key=lambda c: sweep[c])
    seconds = shortest({"tuned": tuned[config], **calls, "scipy": scipy}, rounds)
    swept = {str(c): t for c, t in sweep.items()}
    about = {"config": str(config), "chosen": str(chosen), "sweep": swept}
    return {**about, "seconds": seconds, "wrong": wrong}


def shortest(calls: dict[Any, Callable[[], Any]], rounds: int) -> dict[Any, float]:
    """The shortest call of each, with several in each turn."""

    def step(call: Callable[[], Any]) -> float:
        once = timed(call)
        once()  # finds other data in the caches
        return min(turn(once, TURN, least=3))

    times = in_turns({name: partial(step, call) for name, call in calls.items()}, 0, rounds)
    return {name: times["min"] for name, times in times.items()}


def _right(call: Callable[[], Any], out: Any, exact: Any) -> bool:
    """Whether a call writes the exact result, within the dtype's precision."""
    out[:] = np.nan
    call()
    tolerance = 1e-3 if out.dtype == np.float32 else 1e-10
    return np.allclose(out, exact, rtol=tolerance, atol=tolerance)


def _ready(kernel: Any, values: dict[str, Any]) -> Callable[[], Any]:
    """A call of only the kernel, without the checks of each call (some 20 microseconds)."""
    values = {**values, **kernel.compute(values)}
    arrays = {n: tvm_ffi.from_dlpack(v) if hasattr(v, "shape") else v for n, v in values.items()}
    ordered = [arrays[name] for name in kernel.signature.passed]
    return partial(kernel.run_unchecked, ordered)


def _nest(nests: Any, how: int, order: int, args: dict[str, Any]) -> Callable[[], Any]:
    names = [*"ab", *"cdef"[: order - 1]]
    names += [f"{k}_{part}" for k in "klmn"[: order - 1] for part in ("ptr", "idx")]
    pointers = (ctypes.c_void_p * len(names))(*(args[name].ctypes.data for name in names))
    function = getattr(nests, f"mttkrp_{args['b'].dtype}")
    return partial(function, how, order, *args["a"].shape, pointers)


def _compiled(folder: Path) -> Any:
    if shutil.which(COMPILER[0]) is None:
        print(f"C++: no {COMPILER[0]} here")
        return None
    path = folder / "mttkrp.so"
    subprocess.run([*COMPILER, "-o", str(path), str(SOURCE)], check=True)
    return ctypes.CDLL(str(path))


def _tensor(path: Path) -> tuple[tuple[int, ...], Any]:
    """(shape, coords) of a file."""
    try:
        with np.load(path) as arrays:
            shape, coords = tuple(int(n) for n in arrays["shape"]), arrays["coords"].astype("int64")
    except (OSError, KeyError, ValueError) as error:
        raise GraphError(f"{path}: expected an npz file of shape and coords: {error}") from error
    if not 3 <= len(shape) <= 5 or coords.ndim != 2 or len(coords) != len(shape):
        raise GraphError(
            f"{path}: expected a tensor of order 3 to 5 with coords (order, nnz), got shape "
            f"{shape} and coords {coords.shape}"
        )
    return shape, coords


def _random() -> tuple[str, tuple[int, ...], Any]:
    rng, shape = np.random.default_rng(0), (300, 200, 100)
    coords = np.unique([rng.integers(n, size=20000) for n in shape], axis=1)
    return "random", shape, coords


def _show(cells: list[dict[str, Any]]) -> None:
    title = "MTTKRP with 32 columns in us, and times what the tuned one takes"
    about = ("tensor", "mode", "dtype")
    show_times(title, cells, "seconds", about, "tuned", Form(1e6, 0))
    show_means(cells, "seconds", "tuned")
    print("TACO is no Python package and is not built here: its times are missing.")
