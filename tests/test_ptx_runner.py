"""A few GPU kernels as nvcc's PTX; `pytest --ptx` runs many more so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import cuda_runner
import sparsetir
import tensor_cores_common
from cuda_plans import run_plans
from cuda_runner import KernelError, requires_cuda_text
from cuda_stages import CudaStages
from gpu_runner import requires_nvcc
from ptx_runner import PtxMachine, through_ptx
from sparsetir import masks
from sparsetir.formats import BSR
from sparsetir.schedules.gpu.block_attention import WarpTiles, apply
from sparsetir.schedules.gpu.spmm import RowSplit
from sparsetir.schedules.gpu.spmm_tensor_cores import TensorCores
from sparsetir.schedules.operators import block_attention
from sparsetir.schedules.operators.problems import Spmm
from spmm_gpu_common import MASKS, pattern_of, run_spmm

pytestmark = requires_nvcc
TARGET = {"kind": "cuda", "arch": "sm_80"}
rng = np.random.default_rng(0)
MATRIX = sp.random_array((60, 50), density=0.1, dtype="float32", rng=rng).tocsr()
X, Y = (rng.standard_normal((n, 32)).astype("float32") for n in (50, 60))


@pytest.fixture
def machine() -> Iterator[PtxMachine]:
    with through_ptx() as machine:
        yield machine
    assert machine.launches


def plan(monkeypatch: pytest.MonkeyPatch, op: str, **options: Any) -> Any:
    run_plans(monkeypatch)
    return sparsetir.plan(op, MATRIX, 32, target=TARGET, **options)


def test_spmm_and_sddmm(machine: PtxMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    np.testing.assert_allclose(plan(monkeypatch, "spmm")(X), MATRIX @ X, rtol=1e-4, atol=1e-5)
    wanted = (Y @ X.T)[MATRIX.nonzero()]
    np.testing.assert_allclose(plan(monkeypatch, "sddmm")(Y, X), wanted, rtol=1e-4, atol=1e-5)


def test_blocks_on_tensor_cores(machine: PtxMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands arrive by asynchronous copies and `ldmatrix`."""
    run = plan(monkeypatch, "spmm", format=BSR(16, 16), dtype="float16")
    np.testing.assert_allclose(run(X.astype("float16")), MATRIX @ X, atol=1e-2)


def test_attention(machine: PtxMachine) -> None:
    mask, heads = masks.blocks(np.array([[True, False], [True, True]]), 16), 2
    q, k, v = (rng.standard_normal((heads, 2, 16, 16)).astype("float16") for _ in range(3))
    indptr, indices, kind, bits = (x.numpy() for x in mask.rows)
    problem = block_attention.BlockAttention(16, 16, 16, "float16")
    run = CudaStages(block_attention.program(problem), apply, WarpTiles())
    result = run({
        "q": q, "k": k, "v": v, "scale": 0.25, "heads": heads, "indptr": indptr, "kind": kind,
        "indices": indices, "bits": bits, "rows": 2, "cols": 2, "blocks": 3, "kinds": len(bits),
        "out": np.full_like(q, np.nan), "lse": np.full((heads, 2, 16), np.nan, "float32"),
    })  # fmt: skip
    q, k, v = (x.astype("float64").reshape(heads, 32, 16) for x in (q, k, v))
    scores = np.where(mask.to_dense().numpy(), q @ k.transpose(0, 2, 1) / 4, -np.inf)
    weights = np.exp(scores)
    wanted = weights @ v / weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(result["out"].reshape(wanted.shape), wanted, atol=1e-2)
    lse = np.log(weights.sum(-1))
    np.testing.assert_allclose(result["lse"].reshape(lse.shape), lse, atol=1e-2)


def test_a_missing_barrier_is_found(machine: PtxMachine) -> None:
    matrix, config = pattern_of(MASKS["one dense row"], "int32"), RowSplit(8, 1, 2, row_cache=True)
    with pytest.raises(KernelError, match=r"race: block \d+, thread .* \w+_shared_ptr\["):
        run_spmm(Spmm(), config, matrix, 16,
                 edit=lambda text: text.replace("__syncthreads();\n    if", "if"))  # fmt: skip


def test_copies_that_nobody_waits_for_are_found(machine: PtxMachine) -> None:
    """The emulator's NaN in place of copied values fails the tests, too."""
    config = TensorCores(BSR(16, 16), stages=2, tile=16, warps=(1, 1))
    waits = r"tvm_builtin_ptx_cp_async_wait_group\w*\(\);"
    built = tensor_cores_common.kernel(config, edit=lambda text: re.sub(waits, ";", text))
    mask = tensor_cores_common.pattern(config.format, (32, 48), [3])
    with pytest.raises(KernelError, match="asynchronous copy is on its way, not waited for"):
        tensor_cores_common.check(built, mask, 16)
    with pytest.raises(AssertionError, match="1 of 2 are wrong"):
        wrong = np.array([1, np.nan], "float32")
        tensor_cores_common.compare(wrong, np.ones(2), np.ones(2), 1)


@requires_cuda_text
def test_both_machines_take_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels give the same numbers, and what one of them compiled stays with it."""
    emulated = plan(monkeypatch, "spmm")(X)
    with through_ptx() as machine:
        through = plan(monkeypatch, "spmm")(X)
        assert machine.launches == 2 and cuda_runner.machine is machine
    assert cuda_runner.machine is not machine
    np.testing.assert_allclose(through, emulated, rtol=1e-5, atol=1e-6)
