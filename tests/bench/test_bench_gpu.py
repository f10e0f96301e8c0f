"""The bench on GPUs, as far as it runs without one: on the CPU in its place."""

from __future__ import annotations

import argparse
import json
import sys
import time

import pytest
import torch

import sparsetir
from bench import attention, blocks, gpu_day, run, ways
from bench.__main__ import parser
from bench.blocks import KINDS, Case
from bench.gpu_day import Step
from bench.peers import cusparse, gpu
from bench.ways import Device
from cuda_runner import requires_cuda_text

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


class Event:
    """A stand-in for a CUDA event."""

    def __init__(self, enable_timing):
        self.at = 0.0

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


class Library:
    """A stand-in for cuSPARSE: does nothing, and records its calls."""

    def __init__(self, *without):
        self.calls, self.without = [], without

    def __getattr__(self, name):
        if not name.startswith("cusparse") or name.endswith(self.without):
            raise AttributeError(name)
        return lambda *words: self.calls.append((name, words)) or 0


@pytest.fixture
def device(monkeypatch):
    """The CPU under the name of a GPU; gives the stand-in of cuSPARSE."""
    library = Library()
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    for name in ("full", "empty", "zeros", "ones"):
        original = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *words, make=original, device=None, **rest: make(*words, **rest)
        )
    properties = argparse.Namespace(L2_cache_size=1000)
    for name, value in {
        "Event": Event, "synchronize": lambda: None, "is_available": lambda: True,
        "get_device_name": lambda: "Stand-in", "get_device_properties": lambda _: properties,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cusparse, "load", lambda: library)
    plan = sparsetir.plan
    monkeypatch.setattr(sparsetir, "plan", lambda *words, target, **rest: plan(*words, **rest))
    yield library
    torch.set_grad_enabled(True)


def test_a_run(device, tmp_path, capsys):
    args = argparse.Namespace(
        graph=["cora"], pruned=[], layers=1, feat=[16], op=["spmm"],
        dtype=["float32"], quick=True, peers=None, out=tmp_path, plot=True, target="cuda",
    )  # fmt: skip
    with pytest.raises(SystemExit, match="1 of 1 cells hold wrong results"):
        run.run(args)
    assert "spmm, float32, cuda: ms, and times sparsetir's" in capsys.readouterr().out
    (written,) = tmp_path.glob("run-*-stand-in-*.json")
    (cell,) = json.loads(written.read_text())["results"]["cells"]
    assert set(cell["peers"]) == {"sparsetir", "torch", "dense"} and not cell["failed"]
    assert all(p["calls"] == 6 and 0 < p["min"] <= p["median"] for p in cell["peers"].values())
    # Of a library that writes nothing, no result is taken for right.
    ways = cell["wrong"]["cusparse"].split("; ")
    assert [w.split(":")[0] for w in ways] == [
        f"{kind}{layout}" for layout in ("", " columns")
        for kind in ("CSR_ALG1", "CSR_ALG2", "CSR_ALG3", *(f"COO_ALG{i}" for i in range(1, 5)))
    ]  # fmt: skip
    names = [name for name, _ in device.calls]
    assert names.count("cusparseSpMM_preprocess") == 14 * gpu.COPIES
    assert names.index("cusparseSpMM_preprocess") < names.index("cusparseSpMM")
    assert list(tmp_path.glob("*.png"))


class HostClock:
    def seconds(self, call):
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


# The CPU in place of a GPU: its clock, its turns, copies of operands.
REHEARSAL = Device("cpu", "llvm", HostClock(), (1, 2, ways.COPIES))


@pytest.mark.slow
def test_weights_of_a_gpu_by_formats():
    """Ours by each format that suits, cuBLAS's and torch's; the first copy's result is checked."""
    for kind, stored in (("blocks", {"torch BSR"}), ("weights", set())):
        cell = blocks.measure(Case(kind, 128, 0.7, "float32", 24), REHEARSAL)
        ours = {f"sparsetir {fmt.name}" for fmt in KINDS[kind].formats}
        assert set(cell["times"]) == ours | {"torch dense", "torch CSR"} | stored
        assert not cell["wrong"] and all(t["median"] > 0 for t in cell["times"].values())
        # Panels are for GPUs.
        panels = {"sparsetir panels", "sparsetir panels, atomics"} if kind == "weights" else set()
        assert set(cell["missing"]) == panels
    blocks.show([{**cell, "size": size} for size in (128, 256)], 1)


@pytest.mark.parametrize("module", [run, blocks, attention, gpu_day])
def test_without_a_gpu_it_says_so(module, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    module.run(argparse.Namespace(target="cuda", quick=True))
    assert capsys.readouterr().out == "no CUDA device: skipped\n"


# -- counts of interpreted kernels ---------------------------------------------------------------


@requires_cuda_text
def test_counts_of_kernels(tmp_path, capsys):
    """The plain product: a row takes a warp, a nonzero its row of B."""
    from bench import gpu_counts

    args = parser().parse_args(["gpu_counts", "--quick", "--out", str(tmp_path)])
    gpu_counts.run(args)
    assert "SpMM CSR 32, plain" in capsys.readouterr().out
    (written,) = tmp_path.glob("gpu_counts-none-*.json")
    (cell,) = json.loads(written.read_text())["results"]["cells"]
    assert not cell["wrong"] and cell["plain"]["lanes of a warp"] == 32
    assert cell["plain"]["stores for useful"] == 1 < cell["plain"]["loads for useful"] < 2
    assert all(bound["us"] > 0 for way in ("plain", "sparsetir") for bound in
               cell[way]["bounds"].values())  # fmt: skip


def test_bounds_and_occupancy():
    """An A100: 164 KB of shared memory and 65,536 registers for 64 warps."""
    from bench.gpu_counts import GPUS

    gpu = GPUS["A100"]
    shares = [gpu.occupancy(*of) for of in ((32, 256, 0), (128, 128, 0), (32, 128, 87120))]
    assert shares == [1, 0.25, 0.0625]
    bounds = gpu.bounds({"instructions": 4 * 108 * 1410, "load sectors": 0, "store sectors": 160,
                         "atomic sectors": 0, "memory sectors": 1, "shared passes": 108,
                         "tensor operations": 312})  # fmt: skip
    assert [round(1e12 * x) for x in bounds.values()] == [10**6, 709, 21, 709, 1]


# -- a day on a GPU ------------------------------------------------------------------------------


def day(folder, chosen, monkeypatch, **options):
    """The command with these steps; the states by name, and its JSON file."""
    monkeypatch.setattr(gpu_day, "steps", lambda *_: chosen)
    defaults = {"out": folder, "quick": True, "target": "cpu", "minutes": 0.2, "only": None}
    try:
        gpu_day.run(argparse.Namespace(threads=1, **{**defaults, **options}))
    finally:
        (path,) = folder.glob("gpu_day-*.json")
        cells = json.loads(path.read_text())["results"]["steps"]
    return {c["step"]: c for c in cells}


def python(text):
    return (sys.executable, "-c", text)


def test_a_step_that_takes_too_long_is_ended_with_what_it_started(tmp_path, monkeypatch):
    """The last one has no time left; what was printed is kept."""
    started = "import subprocess, sys; print('begun', flush=True); subprocess.run(['sleep', '60'])"
    chosen = [Step("long", python(started), 0.2), Step("next", python(""), 0.5),
              Step("late", python(""), 0.05)]  # fmt: skip
    cells = day(tmp_path, chosen, monkeypatch)
    assert [c["state"] for c in cells.values()] == ["ended", "done", "no time"]
    assert cells["long"]["printed"] == "begun\n" and cells["long"]["seconds"] < 10


def test_failures_are_told_and_the_rest_is_run(tmp_path, monkeypatch):
    chosen = [Step("bad", python("raise SystemExit(3)"), 0.4), Step("good", python(""), 0.4)]
    with pytest.raises(SystemExit) as error:
        day(tmp_path, chosen, monkeypatch)
    assert error.value.code == 1
    (path,) = tmp_path.glob("gpu_day-*.json")
    cells = json.loads(path.read_text())["results"]["steps"]
    assert [(c["state"], c["code"]) for c in cells] == [("failed", 3), ("done", 0)]


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [False, True])
def test_commands_are_known(target, quick, tmp_path):
    """Commands of the bench are parsed; shares leave each some time."""
    steps = gpu_day.steps(target, quick, tmp_path)
    for step in steps:
        if "bench" in step.command:
            parser().parse_args(step.command[step.command.index("bench") + 1 :])
    assert [s.name for s in steps][:2] == ["tests", "spmm"] and all(s.share < 0.5 for s in steps)
