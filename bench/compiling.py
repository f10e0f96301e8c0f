"""What it costs to import, to compile, and to call."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp
import tvm_ffi

import sparsetir
from bench.harness import finish
from bench.programs import ATTENTION, SPMM
from bench.report import table
from bench.timing import interleaved, progress, shortest
from sparsetir.runtime.targets import host_target

IMPORT = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"


def run(args: argparse.Namespace) -> None:
    seconds = 0.05 if args.quick else 3.0
    results = {
        "import": imports(0 if args.quick else 9),
        "spmm": stages(SPMM, seconds),
        "attention": {} if args.quick else stages(ATTENTION, seconds),
        "call": calls(seconds),
    }
    progress("")
    show(results)
    finish(args, "compile", results)


def imports(repetitions: int) -> dict[str, dict[str, float]]:
    """Seconds of an import in a fresh process; without repetitions, of the first one."""
    found: dict[str, list[float]] = {"tvm": [], "sparsetir": []}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    for turn in range(repetitions + 1):
        progress(f"import, round {turn} of {repetitions}")
        for name, times in found.items():
            command = [sys.executable, "-c", IMPORT.format(name)]
            out = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
            if turn or not repetitions:  # the first round fills the file cache
                times.append(float(out.stdout))
    return {n: shortest(t) for n, t in found.items()}


def stages(script: str, seconds: float) -> dict[str, dict[str, float]]:
    """Seconds of each step from text to a kernel."""
    target = host_target()
    first = sparsetir.from_source(script)
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


def calls(seconds: float) -> dict[str, dict[str, float]]:
    """Seconds of a call that has next to nothing to do."""
    built = sparsetir.build(sparsetir.from_source(SPMM))
    a = sp.random_array((20, 30), density=0.1, format="csr", dtype="float32")
    indices, indptr = a.indices.astype("int32"), a.indptr.astype("int32")
    arrays = [a.data, np.ones((30, 16), "float32"), np.empty((20, 16), "float32"), indptr, indices]
    scalars = (20, 30, a.nnz, 16)
    kinds: dict[str, Callable[[np.ndarray], Any]] = {"NumPy": np.asarray}
    try:
        import torch

        kinds["torch"] = torch.from_numpy
    except ImportError:
        print("torch is not installed: calls with its arrays are left out")
    kinds["TVM"] = tvm_ffi.from_dlpack
    found = {}
    for kind, convert in kinds.items():
        progress(f"calls with {kind} arrays")
        given = [convert(x) for x in arrays]
        found |= interleaved(
            {
                f"{kind}, TVM's own call": lambda x=given: built._run(*x, *scalars),
                f"{kind}, kernel": lambda x=given: built(*x, *scalars),
                f"{kind}, kernel infers sizes": lambda x=given: built(*x),
            },
            seconds,
            most=100_000,
        )
    return found


def show(results: dict[str, Any]) -> None:
    def rows(part: str, unit: float) -> list[list[str]]:
        return [
            [name, f"{t['min'] * unit:.2f}", f"{t['median'] * unit:.2f}"]
            for name, t in results[part].items()
        ]

    table("Import, fresh process (ms)", ["", "min", "median"], rows("import", 1e3))
    table("SpMM (ms)", ["", "min", "median"], rows("spmm", 1e3))
    table("SDDMM, softmax, SpMM in one function (ms)", ["", "min", "median"],
          rows("attention", 1e3))  # fmt: skip
    table("Call of a tiny SpMM (us)", ["", "min", "median"], rows("call", 1e6))
