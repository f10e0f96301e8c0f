"""The features of CPUs in targets, files and records, and what is read of the machine."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import tvm

import sparsetir
from kernel_common import right
from machines import MACHINES
from programs import PROGRAMS
from sparsetir.machine import assume
from sparsetir.records.task import cpu_model, device_name
from sparsetir.schedules import targets
from sparsetir.schedules.targets import (
    assumed_machine,
    cpu_features,
    host_features,
    host_target,
    missing_features,
    resolve_target,
)

x86 = pytest.mark.skipif("sse2" not in host_features(), reason="features by their names on x86")
# What LLVM takes some CPUs of the next for.
ROCKET_LAKE = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "rocketlake"}
SAPPHIRE_RAPIDS = {**ROCKET_LAKE, "mcpu": "sapphirerapids"}


def has_all_of(target):
    """The features by LLVM of a CPU that has a target's features and no others."""
    return {f: f in cpu_features(tvm.target.Target(target)) for f in host_features()}


def differences(name, has):
    return [str(x) for x in targets._named_and_different(name, has).attrs.get("mattr", ())]


def test_the_host_target_has_the_features_of_the_cpu_and_no_others():
    features, has = cpu_features(host_target()), host_features()
    wrong = [f for f in has if f not in targets._UNUSED and has[f] != (f in features)]
    assert has and wrong == missing_features(host_target()) == []


@x86
def test_features_that_the_name_does_not_imply_are_added_and_those_it_lacks_left_out():
    """A CPU that is what its name says is called by it alone."""
    assert differences("rocketlake", has_all_of(ROCKET_LAKE)) == []
    has = has_all_of(SAPPHIRE_RAPIDS)
    added = "+amx-bf16 +amx-int8 +amx-tile +avx512bf16 +avx512fp16 +avxvnni"
    assert differences("rocketlake", has) == added.split()
    has |= {"avx512fp16": False, "gfni": False, "cldemote": False}
    assert differences("sapphirerapids", has) == ["-avx512fp16", "-gfni"]
    features = cpu_features(targets._named_and_different("sapphirerapids", has))
    assert not {"avx512fp16", "gfni"} & features and "amx-tile" in features


@x86
def test_features_keep_the_width_of_vectors():
    spelled = targets._named_and_different("rocketlake", has_all_of(SAPPHIRE_RAPIDS))
    func = PROGRAMS["spmm_bsr"].make("float32", "int32")
    plain, added = (sparsetir.build(func, x).source("asm") for x in (ROCKET_LAKE, spelled))
    assert plain.count("%zmm") == added.count("%zmm") > 0


@x86
def test_a_target_with_features_passes_for_a_key():
    spelled = targets._named_and_different("rocketlake", has_all_of(SAPPHIRE_RAPIDS))
    exported = {str(k): v for k, v in spelled.export().items()}
    assert str(tvm.target.Target(exported)) == str(spelled) and "+amx-bf16" in str(spelled)


# -- exported kernels -------------------------------------------------------------------------


@pytest.mark.skipif(not shutil.which("g++"), reason="no linker: TVM calls g++")
def test_a_kernel_of_another_cpu_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "spmm.so"
    sparsetir.build(PROGRAMS["spmm"].make("float32", "int32")).export(path)
    right(sparsetir.load(path))
    lacks = sorted(set(host_features()) & cpu_features(host_target()) - targets._UNUSED)[0]
    monkeypatch.setattr(targets, "host_features", lambda: {lacks: False})
    with pytest.raises(
        RuntimeError,
        match=rf"load: argument 'path': '.*spmm.so': compiled for a CPU with {lacks}, which this "
        "one lacks; export a kernel that was built for this one",
    ):
        sparsetir.load(path)


# -- records ----------------------------------------------------------------------------------


def test_devices_are_told_apart_by_features():
    here = device_name(host_target())
    features = targets.distinctive_features(f for f, has in host_features().items() if has)
    if not features:
        pytest.skip("LLVM knows no such feature of this CPU")
    assert here == f"{cpu_model()} ({' '.join(features)})"


RNG = np.random.default_rng(0)
A = scipy.sparse.random(300, 200, 0.05, "csr", "float32", rng=RNG)
A.sort_indices()
X = RNG.random((200, 48), dtype="float32")


@pytest.fixture(params=MACHINES)
def machine(request: Any) -> Any:
    with assume(MACHINES[request.param]) as machine:
        yield machine


def test_plans(machine: Any) -> None:
    """Whatever is chosen for a machine gives the product."""
    spmm = sparsetir.plan("spmm", A, feat=48)
    np.testing.assert_allclose(spmm(X), A @ X, rtol=1e-4)
    spmv = sparsetir.plan("spmv", A)
    np.testing.assert_allclose(spmv(X[:, 0].copy()), A @ X[:, 0], rtol=1e-4)
    sddmm = sparsetir.plan("sddmm", A, feat=48)
    left = RNG.random((300, 48), dtype="float32")
    rows = np.repeat(np.arange(300), np.diff(A.indptr))
    result = sddmm(left, X)
    expected = (left[rows] * X[A.indices]).sum(1)
    np.testing.assert_allclose(np.asarray(result).ravel(), expected, rtol=1e-3, atol=1e-4)


def test_names(machine: Any) -> None:
    target = resolve_target("cpu")
    name = device_name(target)
    assert (machine.model or machine.architecture) in name
    assert ("amx-bf16" in name) == ("amx-bf16" in machine.features)
    assumed = assumed_machine(target)
    assert assumed["threads"] == machine.threads and assumed["l2_bytes"] > 0
