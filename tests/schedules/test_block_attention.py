"""Attention over blocks and its gradients: on CPUs, as CUDA on a CPU, and compiled by nvcc."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tvm import tirx

from cuda_runner import requires_cuda_text
from cuda_stages import CudaStages
from gpu_runner import cuda_source, requires_nvcc
from pairs import by_default, covering
from programs import copied
from sparsetir import ScheduleError, build, interpret, lower, masks
from sparsetir.schedules.gpu.block_attention import WarpgroupTiles, WarpTiles, apply
from sparsetir.schedules.gpu.passes import tile_parts
from sparsetir.schedules.operators import block_attention, block_attention_backward
from sparsetir.schedules.operators.edge_attention import EdgeAttention
from sparsetir.schedules.operators.edge_attention import program as edge_program
from sparsetir.schedules.templates import block_attention as on_cpus
from sparsetir.schedules.templates.block_attention import BlockTiles
from sparsetir.sparse_ir.nodes import nodes_of
from spmm_gpu_common import as_dtype, bfloat16_arrays, compile_cuda, instructions

CUDA = {"kind": "cuda", "arch": "sm_90"}
CORES = ("float16", "bfloat16")
# Of products: operands and weights are rounded, by half a unit of the last bit; sums by more.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-22, "float64": 2.0**-50}
HEADS = 2
DEFAULT = WarpTiles()


class Shape(NamedTuple):
    block: int = 16
    feat: int = 16
    width: int = 16
    dtype: str = "float16"


def rows_of_blocks(block: int) -> dict[str, masks.BlockMask]:
    """Masks whose rows have no block, one and several, and blocks that are not full."""
    table = np.zeros((4, 3), bool)
    table[[0, 2, 2, 2, 3, 3], [1, 0, 1, 2, 0, 2]] = True
    scattered = masks.blocks(table, block)
    return {
        "scattered": scattered,
        "partial": scattered & masks.from_elements(*elements(4 * block, 3 * block), block),
        "band": masks.band(4 * block, block, block=block),
        "none": masks.blocks(np.zeros((2, 2), bool), block),
    }


def elements(m: int, n: int) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
    here = np.random.default_rng(1).random((m, n)) < 0.5
    here[3] = False
    indptr = np.concatenate([[0], np.cumsum(here.sum(axis=1))])
    return indptr, np.nonzero(here)[1], (m, n)


def arrays(mask: masks.BlockMask, shape: Shape, seed: int = 0) -> dict[str, Any]:
    """The arguments of the forward kernel."""
    rng, (m, n) = np.random.default_rng(seed), mask.shape
    sizes = {"q": (m, shape.feat), "k": (n, shape.feat), "v": (n, shape.width)}
    inputs: dict[str, Any] = {
        name: rng.standard_normal((HEADS, *size)).astype(as_dtype(shape.dtype))
        for name, size in sizes.items()
    }
    return {**inputs, "scale": float(np.float32(shape.feat**-0.5))}


def pattern(rows: Any) -> dict[str, Any]:
    indptr, indices, kind, bits = (x.numpy() for x in rows)
    sizes = {"rows": len(indptr) - 1, "blocks": len(indices), "kinds": len(bits)}
    return {"indptr": indptr, "indices": indices, "kind": kind, "bits": bits, **sizes}


def exact(inputs: dict[str, Any], mask: masks.BlockMask) -> dict[str, torch.Tensor]:
    """Attention and its gradients in float64."""
    q, k, v, grad = (
        torch.from_numpy(inputs[x].astype("float64")).requires_grad_()
        for x in ("q", "k", "v", "grad")
    )
    here = mask.to_dense()
    scores = (q @ k.transpose(1, 2) * float(inputs["scale"])).masked_fill(~here, -torch.inf)
    some = here.any(1, keepdim=True)
    weights = torch.where(some, scores, 0.0).softmax(-1) * some
    out = weights @ v
    out.backward(grad.detach())
    lse = torch.where(some[:, 0], scores.logsumexp(-1), -torch.inf)
    results = {"out": out, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    return {name: x.detach() for name, x in results.items()}


def by_block(x: np.ndarray, block: int) -> np.ndarray:
    return np.ascontiguousarray(x.reshape(len(x), -1, block, *x.shape[2:]))


def run(
    template: Any, problem: Any, inputs: dict[str, Any], out: Any, config: Any
) -> list[dict[str, np.ndarray]]:
    """The results of a kernel in arrays like these, in two orders of its warps.

    On a CPU also what the interpreter gives.
    """
    args = {
        name: by_block(x, problem.block) if np.ndim(x) > 1 and name != "bits" else x
        for name, x in {**inputs, **out}.items()
    }
    program = template.program(problem)
    if isinstance(config, BlockTiles):
        results = [copied(args), args]
        interpret(program, results[0])
        build(program, schedule=on_cpus.apply, config=config, check=False)(**args)
    else:
        with bfloat16_arrays():
            arch = "sm_90a" if isinstance(config, WarpgroupTiles) else "sm_90"
            results = [CudaStages(program, apply, config, arch)(args)]
    return [{name: result[name].reshape(x.shape) for name, x in out.items()} for result in results]


def nothing(rows: int, width: int, dtype: Any) -> np.ndarray:
    return np.full((HEADS, rows, width) if width else (HEADS, rows), np.nan, dtype)


def check(result: np.ndarray, expected: torch.Tensor, dtype: str, terms: int) -> None:
    """The tolerance has a few roundings of each term, and of the result."""
    exact = expected.numpy()
    size = 1 + np.abs(exact[np.isfinite(exact)]).max(initial=0)
    error = 4 * ROUNDING[dtype] * terms**0.5 * size
    np.testing.assert_allclose(result.astype("float64"), exact, atol=error, rtol=0)


def forward(mask: masks.BlockMask, shape: Shape, config: Any = DEFAULT) -> None:
    dense, (m, n), problem = arrays(mask, shape), mask.shape, block_attention.BlockAttention(*shape)
    expected = exact({**dense, "grad": np.zeros((HEADS, m, shape.width))}, mask)
    args = {**dense, **pattern(mask.rows), "heads": HEADS, "cols": n // shape.block}
    out = {"out": nothing(m, shape.width, as_dtype(shape.dtype))}
    out["lse"] = nothing(m, 0, problem.accumulator)
    for results in run(block_attention, problem, args, out, config):
        check(results["out"], expected["out"], shape.dtype, shape.feat)
        close = 0.05 if shape.dtype in CORES else 1e-5
        np.testing.assert_allclose(results["lse"], expected["lse"], atol=close)


def backward(
    mask: masks.BlockMask, shape: Shape, config: Any = DEFAULT, which: Any = (False, True)
) -> None:
    inputs, dtype, (m, n) = arrays(mask, shape), as_dtype(shape.dtype), mask.shape
    grad = np.random.default_rng(5).standard_normal((HEADS, m, shape.width)).astype(dtype)
    expected = exact({**inputs, "grad": grad}, mask)
    for keys in which:
        problem = block_attention_backward.BlockAttentionBackward(*shape, keys)
        delta = (expected["out"].numpy() * grad.astype("float64")).sum(-1)
        saved = {"lse": expected["lse"].numpy(), "delta": delta}
        saved = {name: x.astype(problem.accumulator) for name, x in saved.items()}
        rows, cols = (mask.columns, m) if keys else (mask.rows, n)
        out = {"dq": nothing(m, shape.feat, dtype)}
        if keys:
            out = {"dk": nothing(n, shape.feat, dtype), "dv": nothing(n, shape.width, dtype)}
        args = {**inputs, **saved, "grad": grad, "heads": HEADS, **pattern(rows)}
        args["cols"] = cols // shape.block
        for results in run(block_attention_backward, problem, args, out, config):
            for name in out:
                check(results[name], expected[name], shape.dtype, 8 * shape.block)


def test_on_a_cpu():
    table = np.array([[True, False], [True, True], [False, False]])
    mask = masks.blocks(table, 16) & masks.from_elements(*elements(48, 32), 16)
    shape, config = Shape(16, 4, 6, "float32"), BlockTiles(8, 2, 3, parallel=False)
    forward(mask, shape, config)
    backward(mask, shape, config)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_types_on_a_cpu(dtype):
    mask, shape = rows_of_blocks(16)["partial"], Shape(16, 4, 6, dtype)
    config = BlockTiles.for_block(16, (512, 32), block_attention.BlockAttention(*shape).accumulator)
    forward(mask, shape, config)
    backward(mask, shape, config)


@requires_cuda_text
@pytest.mark.parametrize("name", by_default(["scattered", "partial"], "partial"))
def test_attention_and_gradients(name):
    shape = Shape(dtype="float16" if name == "partial" else "bfloat16", width=32)
    mask = rows_of_blocks(16)[name]
    forward(mask, shape)
    backward(mask, shape)


@pytest.mark.parametrize("keys", [None, False, True])
def test_two_blocks_of_threads_fit_on_a_multiprocessor(keys):
    """On an A100, rows that are held in registers lie where last stages of others will be."""
    backward, sizes = block_attention_backward, (64, 128, 128, "float16")
    program = block_attention.program(block_attention.BlockAttention(*sizes))
    if keys is not None:
        program = backward.program(backward.BlockAttentionBackward(*sizes, keys))
    func = lower(program, apply, DEFAULT, CUDA)["II scheduled"]
    buffers = [x.buffer for x in nodes_of(tirx.AllocBuffer, func.body)]
    (size,) = [int(b.ty.shape[0]) for b in buffers if b.ty.storage_scope == "shared.dyn"]
    assert 2 * (2 * size + 1024) <= 164 * 1024


SIZES = {
    "block": [16, 32, 64], "feat": [16, 48, 64, 128], "width": [16, 64, 128],
    "dtype": [*CORES], "name": ["scattered", "partial", "band", "none"],
    "config": [WarpTiles(), WarpTiles(1, 3), WarpTiles(2, 4)],
}  # fmt: skip


@requires_cuda_text
@pytest.mark.slow
@pytest.mark.parametrize("places", covering([len(v) for v in SIZES.values()]), ids=str)
def test_sizes(places):
    chosen = [values[n] for values, n in zip(SIZES.values(), places, strict=True)]
    block, feat, width, dtype, name, config = chosen
    mask, shape = rows_of_blocks(block)[name], Shape(block, feat, width, dtype)
    forward(mask, shape, config)
    if block < 64:
        backward(mask, shape, config)


WARPGROUPS = [
    ("band", Shape(64, 64, 128), 4), ("scattered", Shape(64, 128, 128, "bfloat16"), 2),
    ("partial", Shape(128, 128, 64, "bfloat16"), 2), ("partial", Shape(64, 64, 64), 2),
    ("none", Shape(128, 64, 128), 3), ("scattered", Shape(64, 256, 256), 2),
]  # fmt: skip


@requires_cuda_text
@pytest.mark.default(1)
@pytest.mark.parametrize(("name", "shape", "stages"), WARPGROUPS, ids=str)
def test_warpgroups(name, shape, stages):
    mask, config = rows_of_blocks(shape.block)[name], WarpgroupTiles(stages)
    forward(mask, shape, config)
    backward(mask, shape, config)


def scheduled(
    problem: block_attention.BlockAttention, target: Any = CUDA, config: Any = DEFAULT
) -> Any:
    return lower(block_attention.program(problem), apply, config, target)


IN_16_BITS = "expected factors that are loaded in float16 or bfloat16"


@pytest.mark.parametrize(
    ("block", "change", "arch", "message"),
    [
        (16, {"dtype": "float32"}, "sm_90", IN_16_BITS),
        (16, {"feat": 24}, "sm_90", "multiple of 16 columns, got 24 of .QUERY."),
        (
            16,
            {"width": 40},
            "sm_90",
            "expected tiles of a multiple of 16 columns, got 40 of 'TOTAL'",
        ),
        (64, {"dtype": "float32"}, "sm_90a", IN_16_BITS),
        (32, {}, "sm_90a", r"a multiple of 64 coordinates, got 'II' \(32\)"),
        (64, {"feat": 80}, "sm_90a", "rows in memory are a multiple of 64 numbers, got 80 of "),
        (64, {"width": 320}, "sm_90a", "tiles of at most 256 columns, got 320 of 'TOTAL'"),
        (64, {}, "sm_90", "scheduled for a GPU with sm_90a, which target .*sm_90.* lacks"),
    ],
)
def test_refusals(block, change, arch, message):
    problem = block_attention.BlockAttention(*Shape(block, 64, 64)._replace(**change))
    config = DEFAULT if block == 16 else WarpgroupTiles()
    with pytest.raises(ScheduleError, match=message):
        scheduled(problem, {"kind": "cuda", "arch": arch}, config)


MMA = "HMMA.16816.F32.BF16", "LDSM.16.M88.4", "LDSM.16.MT88.4", "LDGSTS.E.BYPASS.128"
WGMMA = "HGMMA.64x64x16.F32.BF16", "WARPGROUP.DEPBAR", "FENCE.VIEW.ASYNC", "LDGSTS.E.BYPASS.128"


@requires_nvcc
@pytest.mark.parametrize("arch", by_default(["sm_80", "sm_90", "sm_90a"], "sm_90", "sm_90a"))
def test_instructions(arch, tmp_path):
    problem = block_attention.BlockAttention(64, 64, 64, "bfloat16")
    config = WarpgroupTiles() if arch == "sm_90a" else DEFAULT
    stages = scheduled(problem, {"kind": "cuda", "arch": arch}, config)
    compiled = compile_cuda(cuda_source(stages["III"], arch), tmp_path, arch)
    assert compiled.spills <= 16
    text = instructions(compiled.cubin)
    for name in WGMMA if arch == "sm_90a" else MMA:
        assert name in text


@requires_cuda_text
@pytest.mark.slow
def test_in_parts(monkeypatch):
    monkeypatch.setattr(tile_parts, "REGISTERS", (64,))
    backward(rows_of_blocks(32)["partial"], Shape(32), WarpTiles(1), which=[True])


@pytest.mark.slow
def test_attention_of_elements_with_heads_first():
    """The same kernel, with heads before rows and columns."""
    rng, heads = np.random.default_rng(0), 2
    indptr, indices = np.array([0, 3, 3, 5], "int32"), np.array([0, 2, 3, 1, 1], "int32")
    shapes = {"q": (3, 5), "k": (4, 5), "v": (4, 6), "out": (3, 6)}
    inputs = {n: rng.standard_normal((heads, *s)).astype("float32") for n, s in shapes.items()}
    inputs["out"][:] = np.nan
    rest = {
        "scores": np.zeros(heads * 5, "float32"), "scale": 0.5, "indptr": indptr,
        "indices": indices, "m": 3, "n": 4, "nnz": 5, "heads": heads, "feat": 5, "width": 6,
    }  # fmt: skip
    outs = []
    for first in (True, False):
        program = edge_program(EdgeAttention(heads_first=first))
        turned = {n: x if first else x.swapaxes(0, 1).copy() for n, x in inputs.items()}
        interpreted = {n: x.copy() for n, x in turned.items()}
        interpret(program, {**interpreted, **rest})
        build(program, check=False)(**turned, **rest)
        np.testing.assert_allclose(turned["out"], interpreted["out"], atol=1e-6)
        outs.append(turned["out"] if first else turned["out"].swapaxes(0, 1))
    np.testing.assert_allclose(outs[0], outs[1], atol=1e-6)
