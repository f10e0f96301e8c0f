"""Products with pruned weights, beside torch's dense, BSR and CSR ones (SparseTIR, section 4.3.2).

On a CPU one weight in blocks, in three types; on a GPU many: pruned in blocks, in pieces of columns
and individually, on tensor cores and, individually, in panels of rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from operator import itemgetter
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

import sparsetir
from bench.harness import run_cells
from bench.report import Form, show_means, show_others, show_times
from bench.ways import Comparison, Device, Way
from sparsetir.formats import BSR, DBSR, SRBCRS, Format
from sparsetir.planning.plan import requested as request
from sparsetir.schedules.gpu.spmm_panels import PanelThreads
from sparsetir.schedules.search.choose import choose

BLOCK, DENSE = 32, "torch dense"
OURS = "sparsetir BSR"
TYPES = {"cpu": ("float32", "float16", "bfloat16"), "cuda": ("float16", "bfloat16")}
SIZES, FEATURES = (1024, 2048, 4096), (512, 128, 1024)
SPARSITY = (0.9, 0.8, 0.95, 0.7, 0.98, 0.5)  # the most informative first, should time run out
CLOSE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Kind:
    """A kind of pruning, and formats that suit it.

    tile : rows and columns that are kept or pruned together
    empty : share of rows of blocks that are empty
    """

    tile: tuple[int, int]
    formats: tuple[Format, ...]
    empty: float = 0.0


# As pruned in papers: blocks (movement pruning leaves rows of them empty: SparseTIR, section
# 4.3.2), pieces of columns, single weights. SR-BCRS of the last has slots without a weight.
KINDS = {
    "blocks": Kind((BLOCK, BLOCK), (BSR(BLOCK, BLOCK), BSR(16, 16), SRBCRS(16, 32))),
    "rows of blocks": Kind((BLOCK, BLOCK), (DBSR(BLOCK, BLOCK), BSR(BLOCK, BLOCK)), 0.5),
    "pieces of columns": Kind((8, 1), (SRBCRS(8, 32), SRBCRS(8, 16))),
    "weights": Kind((1, 1), (SRBCRS(8, 32), SRBCRS(16, 32))),
}


@dataclass(frozen=True)
class Case:
    """A product of a pruned weight with a dense matrix."""

    kind: str
    size: int
    sparsity: float
    dtype: str
    feat: int


def weight(kind: Kind, size: int, sparsity: float, seed: int = 0) -> sp.csr_array:
    """A float32 weight of (size, size), about this share zero, the rest normally distributed."""
    rng, (rows, columns) = np.random.default_rng(seed), kind.tile
    grid = size // rows, size // columns
    kept = np.zeros(grid, bool)
    full = rng.permutation(grid[0])[: max(1, round(grid[0] * (1 - kind.empty)))]
    count = min(round(grid[0] * grid[1] * (1 - sparsity)), len(full) * grid[1])
    places = rng.permutation(len(full) * grid[1])[:count]
    kept[full[places // grid[1]], places % grid[1]] = True
    i, j = np.nonzero(np.kron(kept, np.ones(kind.tile, bool)))
    values = rng.standard_normal(len(i)).astype("float32")
    return sp.csr_array((values, (i, j)), shape=(size, size))


def cases(device: Device, quick: bool) -> Iterator[Case]:
    """Cases: one weight on a CPU; on a GPU all of them, the most informative first."""
    kinds, sizes, features, shares = KINDS, SIZES, FEATURES, SPARSITY
    if device.turns is None:
        kinds, sizes, features, shares = ("blocks",), SIZES[:1], FEATURES[:1], SPARSITY[:1]
    if quick:
        sizes, features, shares = (256,), (64,), (0.75,)
    every = product(shares, sizes, kinds, TYPES[device.name], features)
    for sparsity, size, kind, dtype, feat in every:
        yield Case(kind, size, sparsity, dtype, feat)


def run(args: argparse.Namespace) -> None:
    """The command; status 1 if a result was wrong."""
    device = Device.of(args)
    if device is None:
        return
    todo = ((str(case), partial(measure, case, device)) for case in cases(device, args.quick))
    run_cells(args, "blocks", todo, partial(show, threads=args.threads), ours=OURS)


def measure(case: Case, device: Device) -> dict[str, Any]:
    """Times of all ways whose results are right."""
    matrix = sparsetir.SparseMatrix(weight(KINDS[case.kind], case.size, case.sparsity))
    to = {"dtype": getattr(torch, case.dtype), "device": device.name}
    dense = torch.zeros(matrix.shape)
    rows, columns = (torch.from_numpy(c).long() for c in matrix.pattern.coords)
    dense[rows, columns] = torch.from_numpy(matrix.values)
    dense, rng = dense.to(**to), torch.Generator().manual_seed(1)
    shape = (case.size, case.feat)
    copies = [
        [torch.randn(shape, generator=rng).to(**to), torch.empty(shape, **to)]
        for _ in range(device.copies)
    ]
    exact = dense.double()
    compared = Comparison(
        copies, lambda b, out: exact @ b.double(), CLOSE[case.dtype], steps=("times", ""), written=1
    )
    times = compared.measure(makers(case, matrix, dense, device), device)
    return {**vars(case), "nnz": int(matrix.nnz), **times}


def makers(case: Case, matrix: Any, dense: Any, device: Device) -> dict[str, Callable[[], Way]]:
    """Ways by name; all write into a given array, as far as torch supports that."""

    def ours(**options: Any) -> Way:
        how = {"dtype": case.dtype, "target": device.kernels, **options}
        plan = sparsetir.plan("spmm", matrix, case.feat, **how)
        return lambda b, out: plan(b, out=out)

    def elements() -> Way:
        wanted = request("spmm", matrix, case.feat, dtype=case.dtype)
        # The config for a matrix that does not consist of blocks.
        single = replace(wanted.statistics, block=1)
        return ours(config=choose(wanted.problem, single, wanted.target))

    def torchs(stored: Any) -> Way:
        return lambda b, out: stored @ b

    kind = KINDS[case.kind]
    ways: dict[str, Callable[[], Way]] = {}
    if device.turns is None:
        ways |= {OURS: lambda: ours(format=BSR(BLOCK, BLOCK)), "sparsetir CSR": elements}
    else:
        ways |= {f"sparsetir {f.name}": partial(ours, format=f) for f in kind.formats}
    if device.turns and kind.tile == (1, 1):
        for atomics in (False, True):
            config = PanelThreads.for_features(case.feat, case.dtype, atomics=atomics)
            name = "panels, atomics" if atomics else "panels"
            ways[f"sparsetir {name}"] = partial(ours, config=config)
    if device.turns or case.dtype != "float16":  # it takes torch seconds on most CPUs
        ways[DENSE] = lambda: lambda b, out: torch.mm(dense, b, out=out)
    ways["torch CSR"] = lambda: torchs(dense.to_sparse_csr())
    if kind.tile[1] > 1:
        ways["torch BSR"] = lambda: torchs(dense.to_sparse_bsr((BLOCK, BLOCK)))
    return ways


def show(cells: list[dict[str, Any]], threads: int) -> None:
    """Tables of times, and of their ratios to the best of ours."""
    gpu = len({c["size"] for c in cells}) > 1 or len({c["kind"] for c in cells}) > 1
    form = Form(1e6, 1, "median" if gpu else "min")
    about: dict[str, Any] = {k: lambda c, k=k: c[k] for k in ("kind", "size", "dtype", "feat")}
    about["zeros"] = lambda c: f"{c['sparsity']:.0%}"
    where = "GPU" if gpu else f"threads: {threads}"
    title = f"Products with pruned weights, {where}; us ({form.of}), and times {DENSE}'s"
    show_times(title, cells, "times", about, DENSE, form)
    best = []
    for cell in cells:
        times, ours = cell["times"], {n for n in cell["times"] if n.startswith("sparsetir")}
        if ours:
            others = {n: t for n, t in times.items() if n not in ours}
            least = min((times[n] for n in ours), key=itemgetter("min"))
            best.append({**cell, "times": {OURS: least, **others}})
    show_means(best, "times", OURS, lambda c: f"{c['kind']}, {c['sparsity']:.0%} zeros, our best")
    show_others(cells, lambda c: f"{c['kind']}, {c['size']}")
