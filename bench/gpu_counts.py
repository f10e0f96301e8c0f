"""GPU kernels without a GPU: what their PTX does, counted by interpreting it, beside plain kernels.

The interpreter is that of `tests/`. There is no clock here: `bounds` are what the counts take at
the published peaks of two GPUs.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from bench.harness import finish, measure_each, refuse_bad
from bench.problems import matrix_of, weighted
from bench.report import ROOT, table
from sparsetir import masks
from sparsetir.formats import BSR
from sparsetir.schedules.gpu.block_attention import WarpgroupTiles
from sparsetir.schedules.gpu.block_sddmm import WarpTiles
from sparsetir.schedules.gpu.rgms import RelationalRows
from sparsetir.schedules.gpu.sddmm import FusedNonzeros
from sparsetir.schedules.gpu.spmm import RowSplit
from sparsetir.schedules.gpu.spmm_groups import Groups
from sparsetir.schedules.gpu.spmm_hyb import HybRows
from sparsetir.schedules.gpu.spmm_tensor_cores import TensorCores
from sparsetir.schedules.operators.rgms import Rgms

sys.path += [str(ROOT / "tests"), str(ROOT / "tests/schedules")]
import test_block_attention as attention_tests
import test_rgms_gpu as rgms

import cuda_plans
import cuda_stages
import nvrtc
from cuda_runner import CudaFunction
from ptx import Global, Module
from ptx.peaks import GPUS, Gpu

ARCH, HOPPER = "sm_80", "sm_90a"  # the latter of kernels that only Hopper runs
PLAIN = Path(__file__).with_name("plain_kernels.cu")
OUTPUTS = ("OUT", "C", "Y")  # in programs
WAYS = ("sparsetir", "plain")


class Launch(NamedTuple):
    """A kernel of some PTX, threads of a block, bytes of dynamic shared memory, and counts."""

    ptx: str
    name: str
    threads: int
    dynamic: int
    counts: Counter[str]


LAUNCHES: list[Launch] = []  # of the last work
RESULTS: dict[str, np.ndarray] = {}  # of generated kernels, by their names


class Counting:
    """A kernel of some CUDA whose launches are counted."""

    def __init__(self, source: str, name: str, arch: str = ARCH) -> None:
        self.ptx = nvrtc.ptx_of(source, arch)
        self.kernel = Module(self.ptx)[name]

    def launch(
        self, grid: Any, block: Any, values: Any, memory: Any, dynamic: int = 0, **how: Any
    ) -> Any:
        """Run it, as :meth:`ptx.Kernel.launch` does."""
        counts = self.kernel.launch(grid, block, values, memory, dynamic, **how, cost=True)
        LAUNCHES.append(Launch(self.ptx, self.kernel.name, int(np.prod(block)), dynamic, counts))
        return counts


class Counted(CudaFunction):
    """A generated function, as users have it: without the checks of `CudaFunction`."""

    def __init__(self, func: Any, arch: str = ARCH) -> None:
        super().__init__(func, arch if arch == HOPPER else ARCH)

    def __call__(self, args: Any, **_: Any) -> Any:
        RESULTS.update(out := super().__call__(args, seeds=(0,), races=False))
        return out

    def _compile(self, kernels: Any) -> Any:
        each = {name: Counting(self.source, name, self._arch) for name in kernels}
        return {name: self._launcher(name, kernels[name], each[name]) for name in kernels}


class Case(NamedTuple):
    """Work for a generated kernel, and for a plain one.

    reads, writes : bytes of global memory that it needs, gathered rows once for each nonzero
    run : runs the kernel of a config
    plain : (name of a plain kernel, grid, block, arguments); the last array is the result
    """

    kind: str
    shape: str
    reads: int
    writes: int
    run: Callable[[Any], Any]
    config: Any
    plain: tuple[Any, ...] = ()


def numbers(*shape: int, dtype: str = "float32", seed: int = 1) -> np.ndarray:
    """Random operands."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def plan(name: str, matrix: Any, operands: Any, options: Any, config: Any) -> None:
    """Run a plan."""
    target = {"kind": "cuda", "arch": ARCH}
    sparsetir.plan(name, matrix, target=target, config=config, **options)(*operands)


def graphs() -> Iterator[Case]:
    """Products of Cora, by rows and by elements."""
    a = weighted(matrix_of("cora")).tocsr()
    (m, n), nnz = a.shape, a.nnz
    csr = a.indptr.astype("int32"), a.indices.astype("int32"), a.data
    row, reads = np.repeat(np.arange(m, dtype="int32"), np.diff(a.indptr)), 4 * (m + 1) + 8 * nnz
    for feat in (32, 128):
        b, y, some = numbers(n, feat), numbers(m, feat, seed=2), {"feat": feat}
        configs = {
            "CSR": RowSplit.for_features(feat), "hyb": HybRows.for_features(feat),
            "Groups {1/32 row}": Groups.for_features(feat, lanes=32, group=8),
            "Groups {1/4 row}": Groups.for_features(feat, lanes=4, group=4),
            "Groups {1 nnz, 32}": Groups.for_features(feat, split="non-zeros", group=32),
            "Groups {1 nnz, 8}": Groups.for_features(feat, split="non-zeros", group=8),
        }  # fmt: skip
        plain = f"spmm_{feat}", -(-m // 8), (32, 8), (*csr, b, np.zeros_like(y), m)
        run, size = partial(plan, "spmm", a, (b,), some), reads + 4 * nnz * feat
        for kind, config in configs.items():
            yield Case(f"SpMM {kind}", f"{feat}", size, y.nbytes, run, config, plain)
        run, config = partial(plan, "sddmm", a, (y, b), some), FusedNonzeros.for_features(feat)
        arrays = row, csr[1], y, b, np.zeros_like(a.data), nnz
        plain, size = (f"sddmm_{feat}", -(-nnz // 32), (256,), arrays), 8 * nnz * (1 + feat)
        yield Case("SDDMM", f"{feat}", size, 4 * nnz, run, config, plain)
    run, x = partial(plan, "spmv", a, (numbers(n),), {}), numbers(n)
    plain = "spmv", -(-m // 32), (256,), (*csr, x, np.zeros(m, "float32"), m)
    yield Case("SpMV", "", reads + 4 * nnz, 4 * m, run, None, plain)


def blocks() -> Iterator[Case]:
    """Block-sparse products on tensor cores: 32 rows of blocks of 32 x 32."""
    feat, options = 128, {"feat": 128, "dtype": "float16"}
    b, c = (numbers(1024, feat, dtype="float16") for _ in range(2))
    config = TensorCores.for_features(BSR(32, 32), feat, "float16")
    for count in (3, 9, 29):
        rng, indptr = np.random.default_rng(count), np.arange(33, dtype="int32") * count
        where = np.concatenate([np.sort(rng.permutation(32)[:count]) for _ in range(32)])
        data = numbers(len(where), 32, 32, dtype="float16")
        a = sp.bsr_array((data.astype("float32"), where, indptr), (1024, 1024)).tocsr()
        run, reads = partial(plan, "spmm", a, (b,), options), data.nbytes + 64 * feat * len(where)
        plain = "bsr", 32, (128,), (indptr, where.astype("int32"), data, b, c)
        yield Case("SpMM BSR", f"{count} a row", reads, c.nbytes, run, config, plain)


def relations() -> Iterator[Case]:
    """Relational gather-matmul-scatter: 4 relations among 256 nodes."""
    mask = np.random.default_rng(0).random((4, 256, 256)) < 0.03
    r, i, j = (x.astype("int32") for x in mask.nonzero())
    starts = np.flatnonzero(np.diff(r * 256 + i, prepend=-1))
    pattern = r[starts], i[starts], np.append(starts, len(r)).astype("int32"), j
    for dtype, feat in product(("float32", "float16"), (32, 128)):
        problem = Rgms(dtype, out="float32" if dtype == "float16" else None)
        config = RelationalRows.for_features(feat, feat, dtype, 3, cores=dtype == "float16")
        run = partial(rgms.check, problem, mask=mask, feat_in=feat, feat=feat)
        a, x, w = map(rgms.operands(problem, mask.shape, len(r), feat, feat).get, "axw")
        out = np.zeros((256, feat), "float32")
        reads = len(r) * (4 + a.itemsize * (1 + feat)) + w.nbytes
        plain = f"rgms_{feat}_{dtype}", len(starts), (feat,), (*pattern, a, x, w, out)
        yield Case("RGMS", f"{feat} {dtype}", reads, out.nbytes, run, config, plain)


def attention() -> Iterator[Case]:
    """Attention over a band of whole blocks of 64, one head of 1024 rows, and its gradients."""
    place, configs = np.arange(16), {"": WarpTiles(), "wgmma ": WarpgroupTiles()}
    mask = masks.blocks(abs(place[:, None] - place) <= 2, 64)
    pattern = [x.numpy() for x in mask.rows[:2]]
    for feat, (how, config) in product((64, 128), configs.items()):
        shape, lse = attention_tests.Shape(64, feat, feat, "float16"), np.zeros(1024, "float32")
        q, k, v, scale = attention_tests.arrays(mask, shape).values()
        reads = q.nbytes + 2 * len(pattern[1]) * q.nbytes // 16
        plain = f"attention_{feat}", 16, (128,), (*pattern, q, k, v, scale, lse, np.zeros_like(q))
        run = partial(attention_tests.forward, mask, shape)
        yield Case("attention", f"{how}{feat}", reads, q.nbytes + lse.nbytes, run, config, plain)
        for name, keys in (("dq", False), ("dk, dv", True)):
            run = partial(attention_tests.backward, mask, shape, which=(keys,))
            writes = (1 + keys) * q.nbytes
            kind, size = f"attention {name}", reads + q.nbytes
            yield Case(kind, f"{how}{feat}", size, writes, run, config)


def measure(case: Case) -> dict[str, Any]:
    """The counts of a case by both ways, and whether their results differ."""
    LAUNCHES.clear()
    RESULTS.clear()
    case.run(case.config)
    cell = {"kind": case.kind, "shape": case.shape, "config": repr(case.config)}
    cell["sparsetir"] = summary(case)
    if case.plain:
        LAUNCHES.clear()
        plain = run_plain(*case.plain)
        ours = next(RESULTS[name] for name in OUTPUTS if name in RESULTS).reshape(plain.shape)
        error = np.abs(plain - ours.astype(float)).max() / np.abs(ours).max()
        half = plain.itemsize == 2 or "float16" in case.shape
        cell["plain"], cell["wrong"] = summary(case), bool(error > (1e-2 if half else 1e-5))
    return cell


def run_plain(name: str, grid: int, block: tuple[int, ...], args: tuple[Any, ...]) -> np.ndarray:
    """The result of a plain kernel."""
    memory, values, copies = Global(), [], []
    for a in args:
        if isinstance(a, np.ndarray):
            room = np.zeros(a.nbytes + 64, np.uint8)
            copies.append(room[-room.ctypes.data % 64 :][: a.nbytes].view(a.dtype).reshape(a.shape))
            copies[-1][...] = a
        values.append(memory.add("array", copies[-1]) if isinstance(a, np.ndarray) else a)
    kernel = Counting(PLAIN.read_text(), name)
    kernel.launch((grid, 1, 1), (*block, 1, 1)[:3], values, memory, races=False)
    return copies[-1]


def summary(case: Case) -> dict[str, Any]:
    """Counts over all launches of a call; registers and occupancy of the one that does most."""
    total = sum((launch.counts for launch in LAUNCHES), Counter[str]())
    main = max(LAUNCHES, key=lambda launch: launch.counts["instructions"])
    bounds, gpus = {}, {"H100": GPUS["H100"]} if f".target {HOPPER}" in main.ptx else GPUS
    for name, gpu in gpus.items():
        each = [gpu.bounds(launch.counts) for launch in LAUNCHES]
        by = {need: sum(bound[need] for bound in each) for need in each[0]}
        least = 1e6 * sum(max(bound.values()) for bound in each)
        bounds[name] = {"us": least, "by": max(by, key=by.__getitem__)}
    stores = total["store sectors"] + total["atomic sectors"]
    by_ptxas = gpus.items() if shutil.which("ptxas") else ()
    return {
        **total,
        "launches": len(LAUNCHES),
        "bounds": bounds,
        "lanes of a warp": total["lanes"] / total["instructions"],
        "loads for useful": 32 * total["load sectors"] / case.reads,
        "stores for useful": 32 * stores / case.writes,
        "passes for least": total["shared passes"] / max(total["least passes"], 1),
        "compiled": {name: compiled(main, gpu) for name, gpu in by_ptxas},
    }


def compiled(launch: Launch, gpu: Gpu) -> dict[str, Any]:
    """What ptxas says: registers, bytes that are spilled and shared; occupancy."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernels.ptx"
        source.write_text(launch.ptx)
        arch = HOPPER if f".target {HOPPER}" in launch.ptx else gpu.arch
        command = ["ptxas", f"-arch={arch}", "-v", str(source), "-o", f"{folder}/kernels.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (part,) = (p for p in said.split("Compiling entry function")[1:] if f"'{launch.name}'" in p)
    registers, spills, static = (
        sum(map(int, re.findall(form, part)))
        for form in (r"Used (\d+) registers", r"(\d+) bytes spill", r"(\d+) bytes smem")
    )
    shared = static + launch.dynamic
    return {"registers": registers, "spills": spills, "shared": shared,
            "occupancy": gpu.occupancy(registers, launch.threads, shared)}  # fmt: skip


def show(cells: list[dict[str, Any]]) -> None:
    """A line for each way."""
    means = ("loads for useful", "stores for useful", "passes for least", "lanes of a warp")
    parts = ("registers", "spills", "shared", "occupancy")
    rows = []
    for cell, way in ((cell, way) for cell in cells for way in WAYS if way in cell):
        c = cell[way]
        label = f"{cell['kind']} {cell['shape']}, {way}"
        row = [label, c["instructions"], *(f"{c[name]:.2f}" for name in means)]
        row += [c.get("atomics", 0), c.get("barriers", 0)]
        row += ["/".join(str(round(x[key], 2)) for x in c["compiled"].values()) for key in parts]
        each = (c["bounds"].get(gpu) for gpu in GPUS)
        rows.append([*row, *("-" if x is None else f"{x['us']:.2f} {x['by']}" for x in each)])
    head = ["", "instructions", "loads", "stores", "passes", "lanes", "atomics", "barriers"]
    head += [*parts, *(f"{gpu}, us" for gpu in GPUS)]
    table("GPU kernels, interpreted: counts of a call, and bounds by peaks", head, rows)


def run(args: argparse.Namespace) -> None:
    """The command."""
    if why := nvrtc.unavailable_reason():
        print(f"{why}: nothing is interpreted")
        return
    attention_tests.HEADS = 1
    cases = [case for kind in (graphs, blocks, relations, attention) for case in kind()]
    todo = [case for case in cases if args.kernels in f"{case.kind} {case.shape}"]
    todo = todo[:1] if args.quick else todo
    with pytest.MonkeyPatch.context() as patch:
        for module in (cuda_plans, cuda_stages):
            patch.setattr(module, "CudaFunction", Counted)
        cuda_plans.run_plans(patch)
        cells = measure_each((f"{c.kind} {c.shape}", partial(measure, c)) for c in todo)
    show(cells)
    about = {"gpu": "none (interpreted PTX)", "nvrtc": nvrtc.compiler().version}
    finish(args, "gpu_counts", {"cells": cells}, **about)
    refuse_bad(cells)
