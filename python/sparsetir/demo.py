"""`python -m sparsetir.demo`: the paper's SpMM from script to kernel, on the Cora graph.

The program is that of the SparseTIR paper's appendix A. Prints what each stage is, what each step
took, how long the kernel runs beside scipy and torch.sparse, and how far their results differ.
"""

from __future__ import annotations

import platform
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm.script import sparse_tir as T

import sparsetir
from sparsetir.build import resolve_target
from sparsetir.datasets import load_cora

FEATURES = 128
TOLERANCE = 1e-5
RUN_SECONDS = 0.5
PERFORMANCE_CORES = 1  # TVM's name for the mode that takes the fast cores first


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


def main() -> int:
    """Run the demonstration; 0 when the kernel's result is right."""
    graph = load_cora()
    rng = np.random.default_rng(0)
    dense = rng.standard_normal((graph.shape[1], FEATURES), dtype=np.float32)
    out = np.full((graph.shape[0], FEATURES), np.nan, np.float32)
    print(f"sparsetir {sparsetir.__version__}, TVM {tvm.__version__}, {_processor()}")
    print(f"C = A B: A is Cora {graph.shape}, {graph.nnz} non-zeros; B has {FEATURES} features")

    kernel = _build()
    arguments = (graph.data, dense, out, graph.indptr, graph.indices)
    kernel(*arguments)
    expected = graph @ dense
    error = float(np.abs(out - expected).max() / np.abs(expected).max())

    print("\nrun                                median ms     min ms")
    threads = tvm.runtime.num_threads()
    _row(f"sparsetir, {_count(threads)}", lambda: kernel(*arguments))
    _row("scipy, 1 thread", lambda: graph @ dense)
    _torch_row(graph, dense, threads)
    if threads > 1:
        # The last one: it binds this thread to a core, which new threads (torch's) would inherit.
        tvm.get_global_func("runtime.config_threadpool")(PERFORMANCE_CORES, 1)
        _row("sparsetir, 1 thread", lambda: kernel(*arguments))
    print("(the kernel writes into a given array; the others make a new one at each call)")

    # NaN, where the kernel wrote nothing, is not close either.
    close = error <= TOLERANCE
    verdict = "ok" if close else "WRONG"
    print(f"\nlargest error, relative to the largest value: {error:.1e} ({verdict})")
    print("Next: README.md shows how to write, schedule and call programs of your own.")
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


def _timed(step: Callable[[], Any]) -> tuple[float, Any]:
    """(milliseconds, result) of one call."""
    start = time.perf_counter()
    result = step()
    return (time.perf_counter() - start) * 1e3, result


def _row(name: str, run: Callable[[], Any]) -> None:
    """Run for half a second and print the median and the shortest time."""
    run()
    times: list[float] = []
    end = time.perf_counter() + RUN_SECONDS
    while time.perf_counter() < end:
        times.append(_timed(run)[0])
    print(f"{name:31} {np.median(times):12.3f} {min(times):10.3f}")


def _torch_row(graph: Any, dense: np.ndarray, threads: int) -> None:
    try:
        import torch
    except ImportError:
        print("torch.sparse                    torch is not installed")
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its CSR tensors a beta, at length
        matrix = torch.sparse_csr_tensor(
            *(torch.from_numpy(x) for x in (graph.indptr, graph.indices, graph.data)),
            size=graph.shape,
        )
    operand = torch.from_numpy(dense)
    torch.set_num_threads(threads)
    _row(f"torch.sparse, {_count(threads)}", lambda: matrix @ operand)


def _count(threads: int) -> str:
    return f"{threads} thread{'s' if threads > 1 else ''}"


def _processor() -> str:
    target = resolve_target("llvm")
    return f"Python {platform.python_version()}, CPU {target.attrs['mcpu']}"


if __name__ == "__main__":
    sys.exit(main())
