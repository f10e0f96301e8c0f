"""Decomposed programs on GPU threads: run as OpenCL and as CUDA on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm
import zoo

import sparsetir
from cuda_runner import requires_cuda_text, run_cuda
from gpu_runner import requires_opencl, run_opencl
from programs import PROGRAMS
from sparsetir import formats as F

SPMM = PROGRAMS["spmm"].make("float32", "int32")
HALVES = F.Mixture(
    "halves", (F.BSR(2, 2), F.Hyb(1, 1)), lambda pattern: np.arange(pattern.nnz) % 2
)  # fmt: skip
FORMATS = [
    F.CSR(),
    F.COO(),
    F.BSR(4, 2),
    F.SRBCRS(4, 4),
    F.SELL(4, 8),
    F.DIA(),
    F.Hyb(2, 2),
    F.EnumeratedPatterns(3),
    HALVES,
]


RUNNERS = [
    pytest.param(run_opencl, marks=requires_opencl, id="OpenCL"),
    pytest.param(run_cuda, marks=[requires_cuda_text, pytest.mark.slow], id="CUDA"),
]


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("name", ["random", "one dense row"])
def test_spmm(fmt: F.Format, name: str, run: Any) -> None:
    pattern = zoo.MATRICES[name]
    rng = np.random.default_rng(2)
    stored = rng.standard_normal(pattern.nnz).astype("float32")
    (m, n), feat = pattern.shape, 5
    b = rng.standard_normal((n, feat)).astype("float32")
    converted = fmt.convert(pattern, F.Operand.of(SPMM, "A"))
    _, compute = sparsetir.extract_preprocess(converted.decompose(SPMM))
    scheduled = sparsetir.default_schedule(
        sparsetir.lower_sparse_iter(compute), tvm.target.Target("opencl")
    )
    stage_three = sparsetir.lower_sparse_buffer(scheduled)
    arguments = converted.arguments(A=stored) | {"b": b, "m": m, "n": n, "feat": feat}
    arguments["c"] = np.full((m, feat), np.nan, "float32")
    names = [str(p.name) for p in compute.params]
    values = {p.name: arguments[name] for p, name in zip(stage_three.params, names, strict=True)}
    out = run(stage_three, values)[stage_three.params[names.index("c")].name]
    a = sp.coo_array((stored, tuple(pattern.coords)), pattern.shape)
    np.testing.assert_allclose(out.reshape(m, feat), a @ b, rtol=1e-4, atol=1e-5)
