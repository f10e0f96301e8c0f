"""Code of the GPU templates by nvcc, which needs no GPU: registers, spills, widths of loads."""

from __future__ import annotations

import argparse
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from bench.harness import finish, measure_each
from bench.report import table
from sparsetir.formats import BSR, DBSR, SRBCRS
from sparsetir.runtime.pipeline import kernel_of, lower_template
from sparsetir.schedules.gpu.block_sddmm import WarpTiles
from sparsetir.schedules.gpu.rgms import RelationalRows
from sparsetir.schedules.gpu.rgms_gradients import GradientTiles
from sparsetir.schedules.gpu.sddmm import FusedNonzeros
from sparsetir.schedules.gpu.spmm import RowSplit
from sparsetir.schedules.gpu.spmm_groups import Groups
from sparsetir.schedules.gpu.spmm_hyb import HybRows
from sparsetir.schedules.gpu.spmm_panels import PanelThreads
from sparsetir.schedules.gpu.spmm_tensor_cores import TensorCores
from sparsetir.schedules.operators.block_attention import BlockAttention
from sparsetir.schedules.operators.block_attention_backward import BlockAttentionBackward
from sparsetir.schedules.operators.block_spmm import BlockSddmm, BlockSpmm
from sparsetir.schedules.operators.problems import Sddmm, Spmm
from sparsetir.schedules.operators.rgms import Rgms, RgmsGradient
from sparsetir.schedules.passes.launches import count_launches
from sparsetir.schedules.targets import resolve_target
from sparsetir.schedules.templates.registry import template_of

# Columns, with the SASS opcodes each counts; the last for tensor cores: products by the types of
# factors, loads of matrices from shared memory, asynchronous copies.
OPCODES = {
    "FFMA": r"\bFFMA\b",
    "128 bit": r"\bLDG\.E\.128\b",
    "64 bit": r"\bLDG\.E\.64\b",
    "other loads": r"\bLDG\b(?!\.E\.(?:128|64)\b)",
    "atomics": r"\b(?:RED|REDG|ATOM|ATOMG)\b",
    "shuffles": r"\bSHFL\b",
    "shared": r"\b(?:LDS|STS)\b",
    "HMMA f16": r"\bHMMA\.16816\.F32(?!\.BF16)\b",
    "HMMA bf16": r"\bHMMA\.16816\.F32\.BF16\b",
    "IMMA s8": r"\bIMMA\.16832\.S8\.S8\b",
    "LDSM": r"\bLDSM\b",
    "LDGSTS": r"\bLDGSTS\b",
}
COLUMNS = ("launches", "registers", "spills", "seconds", *OPCODES)

# Sgap's algorithms, in its notation.
GROUPS: dict[str, dict[str, Any]] = {
    "{1 row, 4 col, 1}": {},
    "{4 row, 4 col, 1}": {"work": 4},
    "{1/8 row, 4 col, 8}": {"lanes": 8, "group": 8},
    "{1/32 row, 4 col, 8}": {"lanes": 32, "group": 8},
    "{8 nnz, 4 col, 1}": {"split": "non-zeros", "work": 8},
    "{1 nnz, 4 col, 8}": {"split": "non-zeros", "group": 8},
    "{1 nnz, 4 col, 32}": {"split": "non-zeros", "group": 32},
}

# From enumerate-and-sparse-coarsen, table 2: UFi-UFk-WarpTile-ThreadBlockSize by features.
PANELS = {32: (4, 7, 1, 32), 64: (3, 7, 2, 32), 128: (3, 8, 2, 64)}
HALVES = ("float16", "bfloat16")
Cases = dict[str, tuple[Any, Any]]


def cases(quick: bool) -> Cases:
    """(problem, config) by name."""
    by_name: Cases = {f"spmm csr {f}": (Spmm(), RowSplit.for_features(f)) for f in (128, 32, 512)}
    if quick:
        return dict(list(by_name.items())[:1])
    by_name |= {f"spmm csr 128 {d}": (Spmm(d), RowSplit.for_features(128, d)) for d in HALVES}
    by_name["spmm csr 128 max"] = (Spmm(reduce="max"), RowSplit.for_features(128))
    by_name["spmm csr 128 row cache"] = (Spmm(), RowSplit(32, 1, feat=128, row_cache=True))
    by_name |= {f"spmm hyb(1, 5) {f}": (Spmm(), HybRows.for_features(f)) for f in (32, 128)}
    by_name["spmm hyb(2, 4) 128"] = (Spmm(), HybRows.for_features(128, c=2, k=4))
    by_name |= {f"spmm {n} 64": (Spmm(), Groups.for_features(64, **h)) for n, h in GROUPS.items()}
    by_name |= panels()
    by_name |= {f"sddmm {f}": (Sddmm(), FusedNonzeros.for_features(f)) for f in (32, 128, 512)}
    formats = [BSR(8, 8), BSR(16, 16), BSR(32, 32), BSR(64, 64), DBSR(32, 32)]
    formats += [SRBCRS(t, g) for t in (8, 16) for g in (16, 32)]
    products = [(fmt, "float16") for fmt in formats]
    several = (BSR(32, 32), SRBCRS(8, 16), SRBCRS(16, 32))
    products += [(fmt, dtype) for fmt in several for dtype in ("bfloat16", "int8")]
    for fmt, dtype in products:  # on tensor cores, with the accumulators' type
        problem = Spmm(dtype, out="int32" if dtype == "int8" else "float32")
        by_name[f"spmm {fmt.name} 128 {dtype}"] = problem, TensorCores.for_features(fmt, 128, dtype)
    by_name["sddmm 128 float16"] = (Sddmm("float16"), FusedNonzeros.for_features(128, "float16"))
    for feat, dtype in ((64, "float16"), (64, "bfloat16"), (128, "bfloat16")):
        shape, of = (64, feat, feat, dtype), f"{feat} {dtype}"
        by_name[f"attention {of}"] = (BlockAttention(*shape), WarpTiles())
        for keys, of_what in ((False, "q"), (True, "k, v")):
            problem = BlockAttentionBackward(*shape, keys)
            by_name[f"attention gradient of {of_what} {of}"] = (problem, WarpTiles())
        by_name[f"sddmm of blocks {of}"] = (BlockSddmm(64, 64, dtype, feat), WarpTiles())
        config = TensorCores.for_features(BSR(64, 64), feat, dtype)
        by_name[f"spmm of blocks {of}"] = (BlockSpmm(64, 64, dtype), config)
    return by_name | relational()


def panels() -> Cases:
    """Panels of rows by pattern: the paper's best schedules, and each way with larger panels."""
    by_name: Cases = {}
    for feat, (rows, unroll, warp_tile, block) in PANELS.items():
        # A thread's columns of B are a warp's, or a block's, width apart.
        how = {"threads": block, "coarsen": warp_tile, "atomics": True}
        config = PanelThreads(rows, unroll, feat=feat, **how)
        by_name[f"spmm panels {rows}-{unroll}-{warp_tile}-{block} {feat}"] = Spmm(), config
    for rows, compact, atomics in product((4, 6), (False, True), (False, True)):
        config = PanelThreads.for_features(128, rows=rows, compact=compact, atomics=atomics)
        how = " compact" * compact + " atomics" * atomics
        by_name[f"spmm panels of {rows} 128{how}"] = (Spmm(), config)
    config = PanelThreads.for_features(128, rows=8, compact=True)
    by_name["spmm panels of 8 128 compact"] = (Spmm(), config)
    for dtype in HALVES:
        config = PanelThreads.for_features(128, dtype)
        by_name[f"spmm panels of 4 128 {dtype}"] = (Spmm(dtype), config)
    return by_name


def relational() -> Cases:
    """Relational gather-matmul-scatter, and a convolution: bucket 0 without weights; gradients."""
    by_name: Cases = {}
    for edges, dtype, feat in product((False, True), ("float32", *HALVES), (32, 128)):
        values = None if edges or dtype == "float32" else "float32"
        problem = RgmsGradient(dtype, weighted=not edges, values=values, edges=edges)
        how = {"rows": 64, "cores": dtype != "float32"}
        tiles = GradientTiles.for_features(problem, feat, feat, **how)
        of = "edges" if edges else "relations"
        by_name[f"rgms gradient of {of} {feat} {dtype}"] = (problem, tiles)
    for (of, k, weighted), feat in product(
        (("rgms", 5, True), ("convolution", 0, False)), (32, 128)
    ):
        config = RelationalRows.for_features(feat, feat, k=k)
        by_name[f"{of} {feat}"] = (Rgms(weighted=weighted), config)
        for dtype in HALVES:
            cores = RelationalRows.for_features(feat, feat, dtype, k, cores=True)
            by_name[f"{of} {feat} {dtype}"] = (Rgms(dtype, weighted=weighted, out="float32"), cores)
    return by_name


def run(args: argparse.Namespace) -> None:
    """The command."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        print("nvcc is not on the path: nothing is compiled")
        return
    todo = {n: of for n, of in cases(args.quick).items() if args.kernels in n}
    results = measure_each(
        (f"{name} for {args.arch}", partial(measure, name, *of, args.arch, nvcc))
        for name, of in todo.items()
    )
    rows = [[r["kernel"], *(r.get(column, "-") for column in COLUMNS)] for r in results]
    title = f"GPU kernels compiled for {args.arch}: registers of a thread, bytes spilled, loads"
    table(title, ["kernel", *COLUMNS], rows)
    finish(args, f"gpucode-{args.arch}", results, arch=args.arch)


def measure(name: str, problem: Any, config: Any, arch: str, nvcc: str) -> dict[str, Any]:
    """Counts over all kernels of a template; the most registers of one; CPU seconds to compile."""
    target = resolve_target({"kind": "cuda", "arch": arch})
    template = template_of(config, problem, gpu=True)
    stages = lower_template(template, problem, config, target)
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernels.cu", Path(folder) / "kernels.cubin"
        source.write_text(kernel_of(stages, target).source("cuda"))
        command = [nvcc, f"-arch={arch}", "-cubin", "-Xptxas", "-v", "-o", str(cubin), str(source)]
        start = resource.getrusage(resource.RUSAGE_CHILDREN)
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
        code = disassembled(cubin)
    counts = {} if code is None else {c: len(re.findall(form, code)) for c, form in OPCODES.items()}
    return {
        "kernel": name,
        "config": repr(config),
        "seconds": round(end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime, 1),
        "launches": count_launches(stages["II scheduled"]),
        "registers": max(int(n) for n in re.findall(r"Used (\d+) registers", report)),
        "spills": sum(int(n) for n in re.findall(r"(\d+) bytes spill", report)),
        **counts,
    }


def disassembled(cubin: Path) -> str | None:
    """SASS, by nvdisasm on the path or in this environment (pip: nvidia-cuda-nvdisasm)."""
    wheels = sorted(Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*/bin/nvdisasm"))
    tool = shutil.which("nvdisasm") or next(map(str, wheels), None)
    if tool is None:
        return None
    done = subprocess.run([tool, "-c", str(cubin)], capture_output=True, text=True, check=True)
    return done.stdout
