"""`python -m bench blocks --target cuda`: products with pruned weights on tensor cores.

Beside a dense product (cuBLAS), torch's BSR and CSR, cuSPARSE's blocked ELL and BSR, and blocks in
Triton. (SparseTIR, section 4.3.2.)
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import sparsetir
from bench import harness
from bench.block_weights import KINDS, Kind, weight
from bench.cusparse_blocks import BSR, ELL, CuSparseBlocks
from bench.harness import geomean, refuse_bad
from bench.peers.gpu_clock import Clock, HostClock, take_turns
from bench.report import circumstances, table, write
from bench.timing import progress
from sparsetir.schedules.operators.operands import LEAST_SCALE, TOLERANCES
from sparsetir.tuning.serving import one_line

OURS, DENSE = "sparsetir", "dense"
SIZES, FEATURES = (1024, 2048, 4096), (512, 128, 1024)
SPARSITY = (0.9, 0.8, 0.95, 0.7, 0.98, 0.5)  # the first say most, should time run out
DTYPES = ("float16", "bfloat16")
COPIES, ROUNDS, CALLS = 3, 3, 10
# Tiles of features, warps and stages that Triton's kernel is tried with; the best counts.
TRITON = ((64, 4, 3), (128, 4, 3), (128, 8, 4))

Call = Callable[[int], Any]


@dataclass(frozen=True)
class Device:
    """Where products run: a GPU, or for a rehearsal the CPU.

    kernels : what ours are compiled for
    """

    name: str
    kernels: Any
    clock: Any

    @classmethod
    def gpu(cls) -> Device:
        """The GPU that torch uses."""
        return cls("cuda", "cuda", Clock(torch))

    @classmethod
    def host(cls) -> Device:
        """For a rehearsal."""
        return cls("cpu", "llvm", HostClock())


@dataclass
class Case:
    """A product; what libraries read of a matrix in blocks is beside it.

    matrix : a SparseMatrix in float32, which keeps its conversions
    dense : (m, n) in `dtype` on the device
    copies : of ([dense operand], result)
    stored : the matrix in blocks, where it has any
    """

    kind: Kind
    matrix: Any
    feat: int
    dtype: str
    device: Device
    dense: Any
    copies: list[Any]
    stored: Any = None
    kept: list[Any] = field(default_factory=list)
    op = "spmm"

    @classmethod
    def of(cls, kind: Kind, matrix: Any, feat: int, dtype: str, device: Device) -> Case:
        """Operands are random."""
        to = {"dtype": getattr(torch, dtype), "device": device.name}
        rng = torch.Generator().manual_seed(1)
        (m, n), copies = matrix.shape, []
        for _ in range(COPIES):
            b = torch.randn(n, feat, generator=rng).to(**to)
            copies.append(([b], torch.empty(m, feat, **to)))
        dense = torch.zeros(m, n)
        rows, columns = (torch.from_numpy(c).long() for c in matrix.pattern.coords)
        dense[rows, columns] = torch.from_numpy(matrix.values)
        dense = dense.to(**to)
        made = cls(kind, matrix, feat, dtype, device, dense, copies)
        if min(kind.tile) > 1:
            made.stored = Stored.of(dense, kind.tile[0])
        return made

    @property
    def values(self) -> Any:
        """Of the matrix; cuSPARSE's calls take them from `stored`."""
        return None


@dataclass(frozen=True)
class Stored:
    """A matrix in square blocks: `blocks` (blocks, size, size), arrays of int32."""

    shape: tuple[int, int]
    indptr: Any
    indices: Any
    blocks: Any
    tensor: Any

    @classmethod
    def of(cls, dense: Any, size: int) -> Stored:
        """tensor : torch's of the same"""
        made = dense.to_sparse_bsr((size, size))
        arrays = made.crow_indices().int(), made.col_indices().int()
        return cls(tuple(dense.shape), *arrays, made.values().contiguous(), made)


def ours(case: Case) -> dict[str, Call]:
    """By each format that suits the weight."""
    out: dict[str, Call] = {}
    for fmt in case.kind.formats:
        plan = sparsetir.plan(
            "spmm", case.matrix, case.feat, dtype=case.dtype, target=case.device.kernels,
            format=fmt,
        )  # fmt: skip
        out[fmt.name] = lambda i, plan=plan: plan(*case.copies[i][0], out=case.copies[i][1])
    return out


def dense(case: Case) -> dict[str, Call]:
    """With all zeros, which a pruned weight has to beat."""
    return {"mm": lambda i: torch.mm(case.dense, case.copies[i][0][0], out=case.copies[i][1])}


def torch_sparse(case: Case) -> dict[str, Call]:
    """torch's own: BSR where there are blocks, and CSR."""
    found = {"csr": case.dense.to_sparse_csr()}
    if case.stored is not None:
        found["bsr"] = case.stored.tensor
    return {name: lambda i, a=a: a @ case.copies[i][0][0] for name, a in found.items()}


def cusparse(case: Case) -> dict[str, Call]:
    """Blocked ELL and BSR, with dense matrices by rows and by columns."""
    if case.stored is None:
        raise ValueError("the weight is in no blocks")
    library, out, why = CuSparseBlocks(torch), {}, ""
    case.kept.append(library)
    given = argparse.Namespace(op=case.op, dtype=case.dtype, matrix=case.stored)
    for name in (ELL, BSR):
        try:
            found = library.ways(given, case, name)
        except Exception as error:  # such as a library that has not both
            why = one_line(error)
            continue
        out |= {f"{name} {text}": call for text, call in found.items()}
    if not out:
        raise ValueError(why)
    return out


def triton(case: Case) -> dict[str, Call]:
    """A kernel of the bench's own."""
    from bench.triton_blocks import product

    if case.stored is None:
        raise ValueError("the weight is in no blocks")
    arrays = case.stored.indptr, case.stored.indices, case.stored.blocks

    def call(i: int, how: tuple[int, int, int]) -> Any:
        (b,), out = case.copies[i]
        return product(*arrays, b, out, *how)

    return {"{}, {} warps, {} stages".format(*how): lambda i, how=how: call(i, how)
            for how in TRITON}  # fmt: skip


PEERS = {OURS: ours, DENSE: dense, "torch": torch_sparse, "cusparse": cusparse, "triton": triton}


def run(args: argparse.Namespace) -> None:
    """The command; without a device it says so and measures nothing."""
    if harness.cuda() is None:
        return
    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = False
    where = {**circumstances(1), **harness.of_gpu(torch)}
    found: list[dict[str, Any]] = []
    for cell in cells(Device.gpu(), args.quick):
        found.append(cell)
        record(args.out, where, found)
    progress("")
    show(found)
    refuse_bad(found, [c for c in found if c["wrong"] or OURS in c["missing"]])


def record(out: Any, where: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """Write down what there is so far: a machine that goes away loses one cell."""
    settings = {"rounds": ROUNDS, "calls": CALLS, "copies": COPIES}
    results = {"settings": settings, "cells": found, "summary": summary(found)}
    write(out, "blocks", where, results, quiet=True)


def cells(device: Device, quick: bool) -> Iterator[dict[str, Any]]:
    """Measure everything, the most telling first."""
    sizes, features, shares = (SIZES, FEATURES, SPARSITY) if not quick else ((256,), (64,), (0.75,))
    for sparsity in shares:
        for size in sizes:
            for name, kind in KINDS.items():
                matrix = sparsetir.SparseMatrix(weight(kind, size, sparsity))
                for dtype in DTYPES:
                    for feat in features:
                        progress(f"{name}, {size}, {sparsity:.0%}, {dtype}, {feat} features")
                        case = Case.of(kind, matrix, feat, dtype, device)
                        about = {"kind": name, "size": size, "sparsity": sparsity}
                        about |= {"nnz": int(matrix.nnz), "dtype": dtype, "feat": feat}
                        yield about | compare(case, quick)


def compare(case: Case, quick: bool = False) -> dict[str, Any]:
    """Times of all ways whose results are right: `peers` by name, their best and all variants."""
    out: dict[str, Any] = {"peers": {}, "missing": {}, "wrong": {}}
    right = Right(case.dense, case.copies[0][0][0], case.dtype)
    ways: dict[tuple[str, str], Call] = {}
    for name, make in PEERS.items():
        try:
            found = make(case)
        except Exception as error:  # of a library that is not there, or has no such product
            out["missing"][name] = one_line(error)
            continue
        for variant, call in found.items():
            for _, result in case.copies:
                result.fill_(math.nan)
            try:
                error = right.error(call(0))
            except Exception as problem:
                out["missing"].setdefault(name, f"{variant}: {one_line(problem)}")
                continue
            if error:
                out["wrong"][f"{name} {variant}"] = error
            else:
                ways[name, variant] = call
    rounds, calls = (1, 2) if quick else (ROUNDS, CALLS)
    for (name, variant), times in take_turns(
        case.device.clock, ways, rounds, calls, COPIES
    ).items():
        out["peers"].setdefault(name, {"variants": {}})["variants"][variant] = times
    for found in out["peers"].values():
        best = min(found["variants"], key=lambda v: found["variants"][v]["median"])
        found |= {"variant": best, **found["variants"][best]}
    return out


class Right:
    """What a product of a and b has to be, in float64 of operands in a type."""

    def __init__(self, a: Any, b: Any, dtype: str) -> None:
        a, b = (x.to(getattr(torch, dtype)).double() for x in (a, b))
        self.exact, self.scale = a @ b, a.abs() @ b.abs() + LEAST_SCALE
        self.tolerance = TOLERANCES[dtype]

    def error(self, result: Any) -> str | None:
        """What is wrong, or None; NaN is wrong."""
        off = (result.double() - self.exact).abs() / self.scale
        wrong = ~(off <= self.tolerance)
        if not wrong.any():
            return None
        return f"{wrong.sum().item()} of {wrong.numel()} by up to {off.max().item():.2g}"


def summary(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Geometric means of medians over ours, by kind and sparsity; `best`: the best of a cell."""
    out = []
    keys = dict.fromkeys((c["kind"], c["sparsity"]) for c in found)
    for kind, sparsity in keys:
        ratios: dict[str, list[float]] = {}
        for cell in found:
            if (cell["kind"], cell["sparsity"]) != (kind, sparsity) or OURS not in cell["peers"]:
                continue
            own = cell["peers"][OURS]["median"]
            others = {n: p["median"] / own for n, p in cell["peers"].items() if n != OURS}
            others |= {"best": min(others.values())} if others else {}
            for name, ratio in others.items():
                ratios.setdefault(name, []).append(ratio)
        means = {n: geomean(r) for n, r in ratios.items()}
        out.append({"kind": kind, "sparsity": sparsity, "ratios": means})
    return out


def show(found: list[dict[str, Any]]) -> None:
    """Print tables."""
    names = [n for n in PEERS if any(n in c["peers"] for c in found)]
    rows = []
    for c in found:
        times = [f"{1e6 * c['peers'][n]['median']:.1f}" if n in c["peers"] else "-" for n in names]
        best = c["peers"].get(OURS, {}).get("variant", "-")
        rows.append([c["kind"], c["size"], f"{c['sparsity']:.0%}", c["dtype"], c["feat"],
                     *times, best])  # fmt: skip
    head = ["weight", "size", "zeros", "dtype", "feat", *names, "by"]
    table("Products with pruned weights: medians in microseconds", head, rows)
    rows = []
    others = [*(n for n in names if n != OURS), "best"]
    for line in summary(found):
        ratios = [f"{line['ratios'][n]:.2f}" if n in line["ratios"] else "-" for n in others]
        rows.append([line["kind"], f"{line['sparsity']:.0%}", *ratios])
    title = "Times of others over ours, geometric means; best: of the best of each product"
    table(title, ["weight", "zeros", *others], rows)
    for name, why in {n: w for c in found for n, w in c["missing"].items()}.items():
        print(f"{name} is missing: {why}")
    for cell in found:
        for name, error in cell["wrong"].items():
            print(f"wrong: {name}, {cell['kind']}, {cell['size']}: {error}")
