"""`python -m sparsetir.cli.demo`: SpMM on the Cora graph, from script to kernel, then tuned.

The program is that of the SparseTIR paper's appendix A. Prints what each stage is and what each
step took; then tunes the operator and shows its best configs beside the default. Leaves no files.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm.script import sparse_tir as T

import sparsetir
from sparsetir.data.datasets import load_cora
from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.runtime.targets import resolve_target
from sparsetir.tuning.progress import Bar
from sparsetir.tuning.report import table
from sparsetir.tuning.search import tune

FEATURES = 128
TOLERANCE = 1e-5
TRIALS, SECONDS = 32, 40.0


def spmm_program() -> Any:
    """C = A B for a CSR matrix A, parsed anew at each call."""

    @T.prim_func
    def spmm(
        a: T.handle, b: T.handle, c: T.handle,
        indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32, feat_size: T.int32
    ) -> None:  # fmt: skip
        I = T.dense_fixed(m, idtype="int32")
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype="int32")
        J_ = T.dense_fixed(n, idtype="int32")
        K = T.dense_fixed(feat_size, idtype="int32")
        A = T.match_sparse_buffer(a, (I, J), "float32")
        B = T.match_sparse_buffer(b, (J_, K), "float32")
        C = T.match_sparse_buffer(c, (I, K), "float32")
        with T.sp_iter([I, J, K], "SRS", "csrmm") as [i, j, k]:
            with T.init():
                C[i, k] = 0.0
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    return spmm


def main(trials: int = TRIALS, seconds: float = SECONDS) -> int:
    """Run the demonstration; 0 when results are right, 1 when not, or without Optuna.

    trials, seconds : at most, of the search
    """
    graph = load_cora()
    rng = np.random.default_rng(0)
    dense = rng.standard_normal((graph.shape[1], FEATURES), dtype=np.float32)
    expected = graph @ dense
    print(f"sparsetir {sparsetir.__version__}, TVM {tvm.__version__}, {_processor()}")
    print(f"C = A B: A is Cora {graph.shape}, {graph.nnz} non-zeros; B has {FEATURES} features")

    kernel = _build()
    out = np.full((graph.shape[0], FEATURES), np.nan, np.float32)
    kernel(graph.data, dense, out, graph.indptr, graph.indices)
    written = _error(out, expected)

    print("\nsearching formats and schedules", flush=True)
    try:
        tuned = tune(
            "spmm", SparseMatrix(graph), FEATURES, trials=trials, seconds=seconds, records="",
            progress=Bar(seconds=seconds), graph="cora",
        )  # fmt: skip
    except ImportError as error:
        print(error)
        return 1
    if tuned.interrupted:
        print("interrupted")
        return 1
    print(table(tuned, graph="cora"))
    found = _error(tuned.plan()(dense), expected)

    # NaN, where a kernel wrote nothing, is not close either.
    close = written <= TOLERANCE and found <= TOLERANCE
    verdict = "ok" if close else "WRONG"
    print(f"\nlargest error, relative to the largest value: {max(written, found):.1e} ({verdict})")
    print("Next: `sparsetir tune --help` for graphs of your own; README.md for programs.")
    return 0 if close else 1


def _build() -> sparsetir.Kernel:
    """Go from script to kernel, step by step; print the time and the outcome of each."""
    target = resolve_target("llvm")
    parse_ms, stage1 = _timed(spmm_program)
    lower_ms, stage2 = _timed(lambda: sparsetir.lower_sparse_iter(stage1))
    schedule_ms, scheduled = _timed(lambda: sparsetir.default_schedule(stage2, target))
    flatten_ms, stage3 = _timed(lambda: sparsetir.lower_sparse_buffer(scheduled))
    build_ms, kernel = _timed(lambda: sparsetir.build(scheduled, target))
    steps = [
        ("parse", parse_ms, "stage I, coordinate space", stage1.script()),
        ("lower_sparse_iter", lower_ms, "stage II, position space", stage2.script()),
        ("default_schedule", schedule_ms, "stage II, scheduled", scheduled.script()),
        ("lower_sparse_buffer", flatten_ms, "stage III, flat buffers", stage3.script()),
        # `build` lowers the buffers again: what is left is TVM's compilation.
        ("compile", max(0.0, build_ms - flatten_ms), "LLVM", kernel.source()),
    ]
    print("\nstep                        ms   gives                       lines of text")
    for step, ms, gives, text in steps:
        print(f"{step:20} {ms:9.1f}   {gives:27} {len(text.splitlines()):13}")
    return kernel


def _timed(step: Callable[[], object]) -> tuple[float, Any]:
    """(milliseconds, result) of one call."""
    start = time.perf_counter()
    result = step()
    return (time.perf_counter() - start) * 1e3, result


def _error(result: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(result - expected).max() / np.abs(expected).max())


def _processor() -> str:
    target = resolve_target("llvm")
    return f"Python {platform.python_version()}, CPU {target.attrs['mcpu']}"


if __name__ == "__main__":
    sys.exit(main())
