"""What sparsetir does, in about a minute: a graph, its program, what the compiler chose, a search.

`make demo` runs it. Each time is a median, measured while the text is printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import scipy.sparse

import sparsetir
from sparsetir.datasets import load_cora
from sparsetir.records.task import cpu_model
from sparsetir.runtime import pool
from sparsetir.runtime.texts import aligned, many, micros
from sparsetir.tuning.progress import Bar

try:
    import torch
except ImportError:  # its times are left out
    torch: Any = None

LINE = "Y[i,k] = A[i,j] * X[j,k]"
SHADES = " ░▒▓█"
HEIGHT = 10  # of the picture, in lines
GROUP = 8  # rows of the weight that keep the same columns
TURNS, TURN = 5, 0.06  # of each way when times are measured, and seconds of one
VISITS = {
    "rows": "",
    "sorted": "rows of about the same length follow each other",
    "parts": "columns are visited in parts that fit a cache",
    "panels": "rows are visited together where they have the same columns",
}


def picture(graph: Any) -> list[str]:
    """The matrix, darker where more is stored, and beside it how many rows are how long."""
    sides = [(0, size) for size in graph.shape]
    stored, _, _ = np.histogram2d(*graph.nonzero(), bins=(HEIGHT, 2 * HEIGHT), range=sides)
    shades = np.digitize(stored, np.quantile(stored, [0.25, 0.5, 0.75, 0.95]))
    lines = ["".join(SHADES[shade] for shade in line) for line in shades]
    powers = np.ceil(np.log2(np.diff(graph.indptr).clip(1))).astype(int)
    for n, count in enumerate(np.bincount(powers)[: HEIGHT - 1]):
        bar = "█" * round(30 * count / np.bincount(powers).max())
        lines[n + 1] += f"{2**n:>7} or fewer  {bar} {count}"
    lines[0] += " Neighbours      Papers"
    return lines


def pruned(size: int) -> Any:
    """A square weight of which each `GROUP` of rows keeps a random tenth of the columns."""
    kept = scipy.sparse.random(size // GROUP, size, 0.1, random_state=0, dtype="float32")
    return scipy.sparse.csr_array(scipy.sparse.kron(kept, np.ones((GROUP, 1), "float32"), "csr"))


def arguments(graph: Any, x: np.ndarray) -> dict[str, np.ndarray]:
    """Arrays for the program, by the names of its parameters."""
    ptr, indices = (array.astype("int32") for array in (graph.indptr, graph.indices))
    return {"a": graph.data, "x": x, "A1_ptr": ptr, "A1_idx": indices}


def median_times(ways: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of a call; ways take turns, so that other work slows all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, call in ways.items():
            call()  # not counted: caches hold what the way before it used
            end = time.perf_counter() + TURN
            while not times[name] or time.perf_counter() < end:
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def compare(kernels: Mapping[str, tuple[Any, int]], graph: Any, x: np.ndarray) -> list[float]:
    """Check kernels against scipy; print their times beside those of scipy and torch.

    kernels : by name, each with its number of threads

    Returns the seconds of the kernels.
    """
    arrays, shape = arguments(graph, x), (graph.shape[0], x.shape[1])

    def run(kernel: Any) -> np.ndarray:
        y = np.empty(shape, "float32")  # in each call, as the other libraries do it
        kernel(**arrays, y=y)
        return y

    ways: dict[str, tuple[Callable[[], Any], int]] = {
        name: (lambda kernel=kernel: run(kernel), threads)
        for name, (kernel, threads) in kernels.items()
    }
    for call, _ in ways.values():
        np.testing.assert_allclose(call(), graph @ x, rtol=1e-3)
    ways["scipy"] = (lambda: graph @ x), 1
    if torch is not None:
        parts = (torch.from_numpy(arrays[name]) for name in ("A1_ptr", "A1_idx", "a"))
        a, dense = torch.sparse_csr_tensor(*parts, graph.shape), torch.from_numpy(x)
        ways["torch"] = (lambda: a @ dense), torch.get_num_threads()
    times = median_times({name: call for name, (call, _) in ways.items()})
    ours = [times[name] for name in kernels]
    rows = [
        [
            f"  {name}",
            micros(times[name]),
            many(threads, "thread"),
            f"{times[name] / ours[0]:.2f} x",
        ]
        for name, (_, threads) in ways.items()
    ]
    print("\n".join(aligned(rows, right=True)))
    return ours


def in_words(config: Mapping[str, Any]) -> list[str]:
    """The main choices of a search."""
    chosen = {name.partition(".")[2]: value for name, value in config.items()}
    visit = VISITS[chosen.get("visit", "rows").split()[0]]
    tiles = f"{many(chosen['vectors'], 'vector')} of {chosen['lanes']} features in registers"
    return [*filter(None, [visit]), tiles, "all threads" if chosen["parallel"] else "one thread"]


def main() -> None:
    """Print all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default, what in (
        ("size", 2048, "of the weight to tune for"), ("features", 96, "of each node"),
        ("trials", 24, "schedules to measure, at most"), ("seconds", 15, "of the search, at most"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} ({default})")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "Sparse", UserWarning)  # torch: its CSR is in beta
    rng = np.random.default_rng(0)

    graph = load_cora()
    nodes, edges, features = graph.shape[0], graph.nnz, options.features
    print(f"1. A graph: Cora, {nodes:,} papers and {edges:,} links. The matrix A, darker where")
    print("   more links are, and how many papers have how many neighbours:\n")
    print("\n".join(picture(graph)))

    print(f"\n2. One line sums the {features} features of each paper's neighbours:\n")
    x = rng.random((nodes, features), "float32")
    y = sparsetir.einsum(LINE, A=graph, X=x)
    print(f'  Y = sparsetir.einsum("{LINE}", A=graph, X=x)\n')
    print(f"  Largest difference from scipy's result: {np.abs(y - graph @ x).max():.2g}")

    print("\n3. The program that the line stands for. You can write it by hand, too:\n")
    program = sparsetir.expression(LINE, A="csr")
    print("\n".join(f"  {line}" for line in program.script().splitlines()[2:]))
    print("\n  A1: the columns that a row stores (CSR). S keeps results apart, R adds them up.")

    print("\n4. What the compiler chose, and why:\n")
    told = sparsetir.explain(program, arguments(graph, x))
    kernel, facts = told.kernel, told.facts
    heads = ["loop", "parallel", "why"]
    table = [heads, *([row[head] for head in heads] for row in facts["loops"])]
    print("\n".join(f"  {line}" for line in aligned(table)))
    for shape in facts["innermost"].values():
        print(f"\n  Innermost loop, over features: {shape}.")
    if "equal_work" in facts["scheduled"]:
        print("  Loop i on threads: each gets rows with about as many links.")
    flops, copied = (micros(facts["roofline"][f"{of}_seconds"]) for of in ("compute", "memory"))
    print(f"  For comparison: a dense product of as many flops takes {flops} on this machine,")
    print(f"  a copy of as many bytes {copied}.")

    threads = pool.count()
    print(f"\n5. Median time of a call ({cpu_model()}, float32), and its ratio to sparsetir's:\n")
    compare({"sparsetir": (kernel, threads)}, graph, x)

    weight, size = pruned(options.size), options.size
    print(f"\n6. Tuned to a matrix, a pruned weight of {size:,} x {size:,}. In it {GROUP} rows")
    print(f"   each keep the same columns ({weight.nnz:,} numbers). The default makes use of that")
    print(f"   where its tiles are full, which {features} features do not fill.")
    print(f"   Up to {options.trials} schedules are built, checked and measured:\n", flush=True)
    x = rng.random((size, features), "float32")
    tuned = sparsetir.tune(
        program, arguments(weight, x), trials=options.trials, seconds=options.seconds, records="",
        progress=Bar("   search", options.seconds),
    )  # fmt: skip
    print(f"  {many(len(tuned.trials), 'schedule')} of {tuned.configs} tried", end="; ")
    if tuned.config is None:
        print("measured again, none was 2 % faster than the default, which stays.\n")
        compare({"default": (kernel, threads)}, weight, x)
    else:
        print("the fastest:\n")
        print("\n".join(f"  - {choice}" for choice in in_words(tuned.config)), end="\n\n")
        alone = not all(on for name, on in tuned.config.items() if name.endswith(".parallel"))
        best = tuned.kernel(), 1 if alone else threads
        before, after = compare({"default": (kernel, threads), "tuned": best}, weight, x)
        if after >= before:
            print("  Measured again here, the tuned schedule is no faster than the default.")
    print("\nNext: docs/tutorial.md; `print(sparsetir.explain(program))` shows all of step 4.")


if __name__ == "__main__":
    main()
