"""Plans and built kernels for CUDA, by TVM's own runtime in a process with `ptx.driver`."""

# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm
from tvm.script import tirx as T

import sparsetir
from ptx.installed import device
from sparsetir.formats import BSR
from sparsetir.schedules.gpu.spmm_groups import Groups
from sparsetir.schedules.gpu.spmm_hyb import HybRows
from sparsetir.schedules.gpu.spmm_tensor_cores import TensorCores

RANDOM = np.random.default_rng(0)
A = sp.random(50, 40, 0.1, format="csr", dtype="float32", random_state=1)
B = RANDOM.standard_normal((40, 32)).astype("float32")
BLOCKS = sp.block_diag([RANDOM.standard_normal((32, 32))] * 3, "csr").astype("float32")
HALVES = RANDOM.standard_normal((96, 64)).astype("float16")


def moved(array: np.ndarray) -> Any:
    """An array in the device's memory."""
    return tvm.runtime.tensor(array, tvm.runtime.device("cuda", 0))


def checked(wanted: np.ndarray, name: str, matrix: Any, *operands: np.ndarray, **how: Any) -> Any:
    """A plan, whose result was as wanted."""
    plan = sparsetir.plan(name, matrix, target="cuda", **how)
    out = plan(*map(moved, operands)).numpy()
    small = 1e-2 if out.dtype == "float16" else 1e-4
    np.testing.assert_allclose(out, wanted, small, small * 4)
    return plan


@T.prim_func(s_tir=True)
def too_far(x: T.Buffer((64,), "float32")):
    for b in T.thread_binding(2, "blockIdx.x"):
        for t in T.thread_binding(32, "threadIdx.x"):
            if b * 32 + t == 63:
                x[b * 32 + t + (1 << 28)] = T.float32(1)  # far from all other arrays


def main() -> None:
    """All checks."""
    coo, y = A.tocoo(), RANDOM.standard_normal((50, 32)).astype("float32")
    checked((y[coo.row] * B[coo.col]).sum(1), "sddmm", A, y, B, feat=32)
    checked(A @ B[:, 0], "spmv", A, B[:, 0].copy())
    checked(0 * y, "spmm", sp.csr_array((50, 40), dtype="float32"), B, feat=32)
    for config in (HybRows.for_features(32), Groups.for_features(32, split="non-zeros", group=32)):
        checked(A @ B, "spmm", A, B, feat=32, config=config)
    for config in (
        TensorCores.for_features(BSR(32, 32), 64),
        TensorCores(BSR(32, 32), 64, (1, 2), 8),
    ):
        how: dict[str, Any] = {"feat": 64, "dtype": "float16", "config": config}
        checked(BLOCKS @ HALVES.astype("float32"), "spmm", BLOCKS, HALVES, **how)
    plan = checked(A @ B, "spmm", A, B, feat=32)
    out = moved(y)
    plan(moved(B), out=out, values=moved(2 * A.data))
    np.testing.assert_allclose(out.numpy(), 2 * (A @ B), 1e-4, 1e-5)
    with pytest.raises(ValueError, match="'b': expected an array on a CUDA device, got one on cpu"):
        plan(B)
    tuned = sparsetir.tune(  # in another process, by counts
        "spmm", A, feat=32, target="cuda", trials=2, records="", modules=["ptx.counted"]
    )
    outcomes = [trial.outcome for trial in tuned.trials]
    assert [outcome.state for outcome in outcomes] == ["ok", "ok"], tuned
    assert all(0 < (outcome.seconds or 0) < 1e-6 for outcome in outcomes), outcomes
    with TemporaryDirectory() as folder:
        plan.kernel.export(file := str(Path(folder) / "kernel.so"))
        loaded = tvm.runtime.load_module(file)
        assert loaded.imports_
    built = tvm.compile(too_far, target={"kind": "cuda", "arch": "sm_80"})
    launched, held = len(device.launches), len(device.memory.buffers)
    with pytest.raises(Exception, match=r"writes 4 bytes at .* in no buffer"):
        tvm.compile(too_far, target={"kind": "cuda", "arch": "sm_80"})(
            moved(np.zeros(64, "float32"))
        )
    assert len(device.launches) == launched + 1 and len(device.memory.buffers) == held


if __name__ == "__main__":
    main()
