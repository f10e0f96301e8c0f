"""Launches of no blocks are skipped, and those beyond a GPU's limits refused, by the host part."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportMissingModuleSource=false

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm
from tvm.script import tirx as T

import gpu_host
import sparsetir
from cuda_plans import run_plans
from cuda_runner import requires_cuda_text
from programs import PROGRAMS
from sparsetir.formats import BSR, DBSR, SRBCRS
from sparsetir.runtime.launch_limits import DYNAMIC_SHARED, THREADS, limits_of
from sparsetir.schedules.gpu.spmm import RowSplit
from sparsetir.schedules.gpu.spmm_groups import Groups
from sparsetir.schedules.gpu.spmm_hyb import HybRows
from sparsetir.schedules.gpu.spmm_panels import PanelThreads

SCOPES = ("global", "local", "shared", "shared.dyn")


class Recorded(gpu_host.HostFunction):
    """The host part of a function, whose launches are recorded and do nothing."""

    def __init__(self, func: Any, arch: str = "sm_80") -> None:
        super().__init__(func, {"kind": "cuda", "arch": arch}, SCOPES)

    def _compile(self, kernels: dict[str, Any]) -> dict[str, Any]:
        def launcher(name: str) -> Any:
            return lambda *args: self._launch(name, kernels[name], args)

        return {name: launcher(name) for name in kernels}

    def __call__(self, **sizes: int) -> list[tuple[int, ...]]:
        """The grids of the launches of a call."""
        self._run({"x": np.zeros(1, "float32"), **sizes})
        return [grid for _, grid, _ in self.launches]


def function(extent: Any, dtype: str = "int32", tag: str = "blockIdx.x", threads: int = 32) -> Any:
    """Two launches: one of 3 blocks, one whose blocks along a direction `extent(m, n)` says."""
    size = getattr(T, dtype)

    @T.prim_func(s_tir=True)
    def two(x: T.Buffer((1,), "float32"), m: size, n: size):
        for b in T.thread_binding(3, "blockIdx.x"):
            for t in T.thread_binding(32, "threadIdx.x"):
                if b + t == 0:
                    x[0] = T.float32(1)
        for b in T.thread_binding(extent(m, n), tag):
            for t in T.thread_binding(threads, "threadIdx.x"):
                if b + t == 0:
                    x[0] = x[0] + T.float32(1)

    return two


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_no_blocks_are_not_launched(dtype):
    run = Recorded(function(lambda m, n: (m + 15) // 16, dtype))
    assert run(m=0, n=0) == [(3, 1, 1)]
    assert run(m=17, n=0) == [(3, 1, 1), (2, 1, 1)]
    never = Recorded(function(lambda m, n: T.int64(0), dtype, "blockIdx.y"))
    assert never(m=17, n=0) == [(3, 1, 1)]


def test_tools_refuse_what_a_driver_refuses(monkeypatch):
    """A launch whose host part is thereby observable."""
    monkeypatch.setattr(gpu_host, "launched_within_limits", lambda mod: mod)
    run = Recorded(function(lambda m, n: (m + 15) // 16))
    with pytest.raises(ValueError, match=r"launched with 0 of blockIdx\.x, not 1 to 2147483647"):
        run(m=0, n=0)


def test_extents_are_computed_in_64_bits():
    """Sums and products of 32 bits would be negative, and nothing launched."""
    assert Recorded(function(lambda m, n: (m + 15) // 16))(m=2**31 - 1, n=0)[1] == (2**27, 1, 1)
    uneven = Recorded(function(lambda m, n: (m + 99) // 100))
    assert uneven(m=2**31 - 48, n=0)[1] == (21474836, 1, 1)
    with pytest.raises(
        ValueError, match=r"at most 2147483648 positions in blockIdx\.x, got 21474837"
    ):
        uneven(m=2**31 - 1, n=0)  # positions of the last block do not fit
    product = Recorded(function(lambda m, n: (m * n + 1023) // 1024))
    assert product(m=2**20, n=2**10)[1] == (2**20, 1, 1)
    with pytest.raises(ValueError, match=r"positions in blockIdx\.x, got 4294967296"):
        product(m=2**20, n=2**12)
    with pytest.raises(ValueError, match="at most 2147483647 blocks in x, got 2147483652"):
        Recorded(function(lambda m, n: m * 4))(m=2**29 + 1, n=0)


@pytest.mark.parametrize(
    ("tag", "most"), [("blockIdx.x", 2**31 - 1), ("blockIdx.y", 65535), ("blockIdx.z", 65535)]
)
def test_too_many_blocks_are_refused(tag, most):
    run = Recorded(function(lambda m, n: m, "int64", tag))
    assert max(run(m=most, n=0)[1]) == most
    for count in (most + 1, 2**32 + 5):  # which a driver reads as 5
        message = f"two_kernel_1: expected at most {most} blocks in {tag[-1]}, got {count}"
        with pytest.raises(ValueError, match=message):
            run(m=count, n=0)
    with pytest.raises(ValueError, match=f"at most {most} blocks in {tag[-1]}, got {most + 1}"):
        Recorded(function(lambda m, n: T.int64(most + 1), "int64", tag))


def test_too_many_threads_are_refused():
    Recorded(function(lambda m, n: m, threads=1024))
    with pytest.raises(ValueError, match="expected at most 1024 threads in a block, got 1056"):
        Recorded(function(lambda m, n: m, threads=1056))


def sharing(size: int, scope: str) -> Any:
    @T.prim_func(s_tir=True)
    def shares(x: T.Buffer((1,), "float32"), m: T.int32):
        for b in T.thread_binding(m, "blockIdx.x"):
            for t in T.thread_binding(32, "threadIdx.x"):
                S = T.alloc_buffer((size,), "float32", scope=scope)
                S[(t * 37 + b) % size] = T.Cast("float32", t)
                if b + t == 0:
                    x[0] = S[size - 1]

    return shares


@pytest.mark.parametrize(
    ("arch", "scope", "most"),
    [
        ("sm_80", "shared", 48), ("sm_90", "shared", 48), ("sm_80", "shared.dyn", 163),
        ("sm_86", "shared.dyn", 99), ("sm_90a", "shared.dyn", 227), ("sm_75", "shared.dyn", 64),
    ],
)  # fmt: skip
def test_too_much_shared_memory_is_refused(arch, scope, most):
    elements = most * 256
    assert Recorded(sharing(elements, scope), arch)(m=2) == [(2, 1, 1)]
    message = f"shares_kernel: expected at most {most * 1024} bytes of .*shared memory, got "
    with pytest.raises(ValueError, match=f"{message}{most * 1024 + 4}"):
        Recorded(sharing(elements + 1, scope), arch)


def test_limits_of_other_gpus():
    """Limits that TVM knows of a target; blocks are numbered in 32 bits everywhere."""
    limits = limits_of(tvm.target.Target("vulkan"))
    assert limits[THREADS] == 256
    assert set(limits) == {THREADS, "blockIdx.x", "blockIdx.y", "blockIdx.z"}
    assert limits_of(tvm.target.Target("opencl"))[DYNAMIC_SHARED] == 16384


@pytest.mark.parametrize("target", ["cuda", {"kind": "cuda", "arch": "sm_90"}])
@pytest.mark.default(1)
def test_built_kernels_check_their_launches(target):
    """Functions without limits, as in these tests; and those of a CPU, which launch nothing."""
    program = PROGRAMS["spmm"].make("float32", "int64")
    assert "sparsetir.refuse_launch" in sparsetir.build(program, target).source("ll")
    assert "refuse_launch" not in sparsetir.build(program).source("ll")


CONFIGS = [
    {}, {"format": BSR(8, 8)}, {"dtype": "float16", "format": DBSR(32, 32)},
    {"dtype": "float16", "format": SRBCRS(8, 16)},
    {"config": Groups.for_features(16, split="non-zeros", group=32)},
    {"config": Groups.for_features(16, split="non-zeros", work=8)},
    {"config": HybRows.for_features(16)}, {"config": RowSplit(16, 1, feat=16, row_cache=True)},
    {"config": PanelThreads.for_features(16, compact=True)},
]  # fmt: skip


@requires_cuda_text
@pytest.mark.parametrize("options", CONFIGS, ids=lambda o: "-".join(map(str, o.values()))[:30])
@pytest.mark.default("float16-DBSR(rows=32, cols=32)", "Groups(split='non-zeros', work0")
def test_matrices_without_elements(options, monkeypatch):
    run_plans(monkeypatch)
    empty = sp.csr_array((64, 32), dtype="float32")
    target = {"kind": "cuda", "arch": "sm_80"}
    plan = sparsetir.plan("spmm", empty, 16, target=target, **options)
    out = plan(np.ones((32, 16), options.get("dtype", "float32")))
    np.testing.assert_array_equal(out, np.zeros((64, 16)))
