"""What reads the machine works on any, and says what it says of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse

import sparsetir
from machines import MACHINES, on
from sparsetir.records.fingerprint import device_name
from sparsetir.runtime.targets import resolve_target
from sparsetir.schedules.default import assumed_machine

RNG = np.random.default_rng(0)
A = scipy.sparse.random(300, 200, 0.05, "csr", "float32", rng=RNG)
A.sort_indices()
X = RNG.random((200, 48), dtype="float32")


@pytest.fixture(params=MACHINES)
def machine(request: Any) -> Any:
    with on(MACHINES[request.param]):
        yield MACHINES[request.param]


def test_plans(machine: Any) -> None:
    """Whatever is chosen for a machine gives the product."""
    spmm = sparsetir.plan("spmm", A, feat=48)
    np.testing.assert_allclose(spmm(X), A @ X, rtol=1e-4)
    spmv = sparsetir.plan("spmv", A)
    np.testing.assert_allclose(spmv(X[:, 0].copy()), A @ X[:, 0], rtol=1e-4)
    sddmm = sparsetir.plan("sddmm", A, feat=48)
    left = RNG.random((300, 48), dtype="float32")
    rows = np.repeat(np.arange(300), np.diff(A.indptr))
    found = sddmm(left, X)
    expected = (left[rows] * X[A.indices]).sum(1)
    np.testing.assert_allclose(np.asarray(found).ravel(), expected, rtol=1e-3, atol=1e-4)


def test_names(machine: Any) -> None:
    target = resolve_target("cpu")
    name = device_name(target)
    assert (machine.cpu or "x86_64") in name
    assert ("amx-bf16" in name) == ("amx-bf16" in machine.features)
    assumed = assumed_machine(target)
    assert assumed["threads"] == machine.cores and assumed["l2_bytes"] > 0
