"""Readings of machines, on folders and values that stand for other systems."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import tvm

import sparsetir
from machines import MACHINES
from sparsetir.machine import (
    assume,
    linux,
    macos,
    real_machine,
    support_status,
    this_machine,
    useful,
)
from sparsetir.runtime import pool
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.registers import most_sum_vectors, sum_vectors
from sparsetir.schedules.search.choose import Statistics, candidates
from sparsetir.schedules.targets import vector_registers
from sparsetir.tuning.measure import cores_for

CPU = "sys/devices/system/cpu/cpu"


def written(folder: Path, texts: dict[str, str]) -> Path:
    """A folder with files of texts, by their paths below it."""
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return folder


def cores_of(threads: dict[int, str]) -> dict[str, str]:
    return {f"{CPU}{n}/topology/thread_siblings_list": text for n, text in threads.items()}


def test_two_threads_of_a_core_are_one(tmp_path):
    machine = linux(
        written(tmp_path, cores_of({0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"})), "x86_64", range(4)
    )
    assert (machine.cores, list(machine.cpus)) == (2, [0, 1, 2, 3])
    # Where the system says nothing, each processor is a core.
    assert linux(written(tmp_path, {}) / "none", "x86_64", range(4)).cores == 4
    # Processors that this process may not use are no cores of it.
    assert linux(written(tmp_path, {}), "x86_64", [0, 2]).cores == 1


V2, V1 = "sys/fs/cgroup/cpu.max", "sys/fs/cgroup/cpu,cpuacct/cpu.cfs"
GROUPS = [
    (2, {"proc/self/cgroup": "0::/", V2: "200000 100000"}),
    (64, {"proc/self/cgroup": "0::/", V2: "max 100000"}),
    (1, {"proc/self/cgroup": "0::/", V2: "50000 100000"}),
    (2, {"proc/self/cgroup": "0::/", V2: "250000 100000"}),
    # The least of a group and those around it.
    (3, {"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "800000 100000",
         "sys/fs/cgroup/a/cpu.max": "300000 100000"}),
    # Version 1: a hierarchy for processors among others; a container sees its own group.
    (4, {"proc/self/cgroup": "5:memory:/docker/1\n4:cpu,cpuacct:/docker/1\n0::/",
         f"{V1}_quota_us": "400000", f"{V1}_period_us": "100000",
         "sys/fs/cgroup/memory/cpu.cfs_quota_us": "100000",
         "sys/fs/cgroup/memory/cpu.cfs_period_us": "100000"}),
    (64, {"proc/self/cgroup": "4:cpu,cpuacct:/", f"{V1}_quota_us": "-1",
          f"{V1}_period_us": "100000"}),
    (64, {"proc/self/cgroup": "garbage\n:::\n", V2: "x y z"}),
    (64, {}),
]  # fmt: skip


def test_a_container_has_the_cores_that_its_group_is_granted(tmp_path):
    for number, (granted, texts) in enumerate(GROUPS):
        machine = linux(written(tmp_path / str(number), texts), "x86_64", range(64))
        assert (machine.cores, len(machine.cpus)) == (granted, granted), texts


def test_workers_of_a_tuner_keep_to_it(tmp_path):
    limit = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "200000 100000"}
    with assume(linux(written(tmp_path, limit), "x86_64", range(64))):
        assert cores_for(2, 1) == [(0,), (1,)]
        with pytest.raises(ValueError, match="need 3 processors, there are 2"):
            cores_for(3, 1)


def test_slow_cores_serve_where_they_are_many():
    """The slowest of equal parts decides."""
    assert useful([1024] * 8) == 8
    assert useful([1024] * 8 + [512] * 4) == 8
    assert useful([1024] * 8 + [512] * 16) == 24
    assert useful([1024, 900, 900, 900, 300, 300, 300, 300]) == 4


def test_hybrid_cpus_of_intel(tmp_path):
    """8 P cores of two threads, 4 E cores of one, whose cache is not the one that counts."""
    threads = {n: f"{n & ~1}-{n | 1}" for n in range(16)} | {n: str(n) for n in range(16, 20)}
    caches = {"cpu0/cache/index0": "2 Unified 1280K", "cpu16/cache/index0": "2 Unified 2048K"}
    texts = cores_of(threads) | {"sys/devices/cpu_atom/cpus": "16-19"}
    for name, text in caches.items():
        for kind, value in zip(("level", "type", "size"), text.split()):
            texts[f"sys/devices/system/cpu/{name}/{kind}"] = value
    machine = linux(written(tmp_path, texts), "x86_64", range(20))
    assert (machine.cores, machine.caches) == (8, {"L2": 1280 << 10})
    # Bound to E cores, a process uses these.
    machine = linux(written(tmp_path, {}), "x86_64", range(16, 20))
    assert (machine.cores, machine.caches) == (4, {"L2": 2 << 20})


def test_big_and_little_cores_of_arm(tmp_path):
    """The fastest ones come first for workers, and their cache counts."""
    texts = {f"{CPU}{n}/cpu_capacity": str(400 if n < 4 else 1024) for n in range(8)}
    for n in (0, 4):
        values = ("2", "Unified", "512K" if n == 0 else "2048K", f"{n}-{n + 3}")
        for kind, value in zip(("level", "type", "size", "shared_cpu_list"), values):
            texts[f"{CPU}{n}/cache/index2/{kind}"] = value
    machine = linux(written(tmp_path, texts), "aarch64", range(8))
    assert (machine.cores, list(machine.cpus)) == (4, [4, 5, 6, 7, 0, 1, 2, 3])
    assert machine.caches == {"L2": 512 << 10}  # a quarter of what four cores share
    assert machine.model == ""  # Linux gives none on ARM


def test_caches_are_what_the_system_says(tmp_path):
    """Caches of data alone, and none of unknown kinds."""
    caches = ("1 Data 48K", "1 Instruction 32K", "2 Unified 2048K", "3 Unified 36M", "4 Unified ?")
    texts = {f"{CPU}0/cache/index5/id": "1", "proc/cpuinfo": "processor : 0\nmodel name\t: A CPU "}
    for number, cache in enumerate(caches):
        for name, text in zip(("level", "type", "size"), cache.split(), strict=True):
            texts[f"{CPU}0/cache/index{number}/{name}"] = text
    machine = linux(written(tmp_path, texts), "x86_64", [0])
    assert machine.caches == {"L1d": 48 << 10, "L2": 2 << 20, "L3": 36 << 20}
    assert machine.model == "A CPU"


@pytest.mark.skipif(sys.platform != "linux", reason="what Linux says")
def test_this_machine():
    machine = real_machine()
    assert machine.system == "linux" and {"L1d", "L2"} <= machine.caches.keys()
    assert 1 <= machine.cores <= len(machine.cpus)


APPLE = {
    "machdep.cpu.brand_string": b"Apple M1\0", "hw.physicalcpu": (8).to_bytes(4, "little"),
    "hw.perflevel0.physicalcpu": (4).to_bytes(4, "little"),
    "hw.perflevel0.cpusperl2": (4).to_bytes(4, "little"),
    "hw.perflevel0.l1dcachesize": (128 << 10).to_bytes(8, "little"),
    "hw.perflevel0.l2cachesize": (12 << 20).to_bytes(8, "little"),
    "hw.l2cachesize": (4 << 20).to_bytes(8, "little"),
}  # fmt: skip


def test_macos():
    machine = macos(lambda name: APPLE.get(name, b""), "arm64", range(8))
    assert (machine.model, machine.cores) == ("Apple M1", 4)
    assert machine.caches == {"L1d": 128 << 10, "L2": 3 << 20}
    old = {"hw.physicalcpu": b"\x04\0\0\0", "hw.l2cachesize": (256 << 10).to_bytes(8, "little")}
    machine = macos(lambda name: old.get(name, b""), "x86_64", range(8))
    assert (machine.cores, machine.caches) == (4, {"L2": 256 << 10})
    assert macos(lambda name: b"", "arm64", range(8)).cores == 8


def test_only_what_has_run_is_called_tested():
    assert support_status(linux_or("linux", "x86_64")) == "Linux on x86_64: tested"
    emulated = "Linux on aarch64: kernels ran under emulation; speed not measured"
    assert support_status(linux_or("linux", "aarch64")) == emulated
    assert support_status(linux_or("darwin", "arm64")) == "macOS on arm64: not tested"
    assert support_status(linux_or("win32", "AMD64")) == "Windows on AMD64: not tested"


def linux_or(system: str, architecture: str) -> Any:
    return MACHINES["unknown"]._replace(system=system, architecture=architecture)


def test_pools_of_other_systems():
    """Libraries of torch are looked for by the names that they have there."""
    with assume(linux_or("win32", "AMD64")):
        assert pool._openmp() is None
        assert pool._why_none() == "torch's is looked for on linux and darwin alone"
    with assume(linux_or("darwin", "arm64")):
        assert "looked for" not in pool._why_none()


def test_kernels_are_opened_and_called_on_other_systems(tmp_path):
    """Kernels are in plain files, since these systems have no files in memory."""
    matrix = scipy.sparse.random(60, 50, 0.1, "csr", "float32", rng=np.random.default_rng(0))
    x = np.ones((50, 8), "float32")
    with assume(linux_or("darwin", real_machine().architecture)):
        plan = sparsetir.plan("spmm", matrix, feat=8)
        np.testing.assert_allclose(plan(x), matrix @ x, rtol=1e-5)


# -- registers -------------------------------------------------------------------------------------

TARGETS = {
    (512, 32): {"mtriple": "x86_64-linux-gnu", "mcpu": "icelake-server"},
    (256, 16): {"mtriple": "x86_64-linux-gnu", "mcpu": "znver3"},
    (128, 16): {"mtriple": "x86_64-linux-gnu", "mcpu": "x86-64"},
    (128, 32): {"mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-n1"},
}


@pytest.mark.parametrize("size", TARGETS)
def test_registers_are_those_of_the_target(size):
    target = tvm.target.Target({"kind": "llvm", **TARGETS[size]})
    assert vector_registers(target) == size
    chosen = candidates(Spmm("float32"), Statistics(10**5, 10**5, 10**6, 512), target)
    assert max(config.tile // config.lanes for config in chosen) == sum_vectors(size[1])
    assert chosen[0].lanes == size[0] // 32
    assert most_sum_vectors(size[1]) < size[1]


def test_contexts_that_end_in_another_order():
    """Each takes its own machine away, as a generator that is dropped late does."""
    before, one, two = this_machine(), MACHINES["1 core"], MACHINES["64 cores"]
    outer, inner = assume(one), assume(two)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert this_machine() is two
    inner.__exit__(None, None, None)
    assert this_machine() is before
