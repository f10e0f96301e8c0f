"""The bench of GPU operators, as far as it runs without one: on a stand-in for the device."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import pytest

import sparsetir

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[1]


class Event:
    """In place of a CUDA event."""

    def __init__(self, enable_timing):
        self.at = 0.0

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


class Library:
    """In place of cuSPARSE: does nothing, and notes what it was asked for."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        if not name.startswith("cusparse"):
            raise AttributeError(name)
        return lambda *words: self.calls.append((name, words)) or 0


@pytest.fixture
def device(monkeypatch):
    """The CPU under the name of a GPU; gives the stand-in of cuSPARSE."""
    from bench import gpu
    from bench.peers import cusparse

    library = Library()
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    for name in ("full", "empty", "zeros", "ones"):
        made = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *words, made=made, device=None, **rest: made(*words, **rest)
        )
    properties = argparse.Namespace(L2_cache_size=1000)
    for name, value in {
        "Event": Event, "synchronize": lambda: None, "is_available": lambda: True,
        "get_device_name": lambda: "Stand-in", "get_device_properties": lambda _: properties,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cusparse, "load", lambda: library)
    monkeypatch.setattr(gpu, "PEAK_SIZE", 64)
    plan = sparsetir.plan
    monkeypatch.setattr(sparsetir, "plan", lambda *words, target, **rest: plan(*words, **rest))
    yield library
    torch.set_grad_enabled(True)


def test_a_run(device, tmp_path, capsys):
    from bench.gpu import COPIES, run

    args = argparse.Namespace(
        graph=["cora"], pruned=[], layers=1, synthetic=[], feat=[16], op=["spmm"],
        dtype=["float32"], quick=True, peers=None, out=tmp_path, plot=True,
    )  # fmt: skip
    with pytest.raises(SystemExit, match="1 of 1 cells hold wrong results"):
        run(args)
    assert "spmm, float32, cuda: ms as min/median" in capsys.readouterr().out
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
    asked = [name for name, _ in device.calls]
    assert asked.count("cusparseSpMM_preprocess") == 14 * COPIES
    assert asked.index("cusparseSpMM_preprocess") < asked.index("cusparseSpMM")
    assert list(tmp_path.glob("*.png"))


def test_without_a_gpu_cuda_is_skipped(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    from bench.gpu import run

    run(argparse.Namespace())
    assert capsys.readouterr().out == "no CUDA device: skipped\n"


def test_gpu_code(tmp_path):
    """Compiled by nvcc where there is one: vector loads, nothing spilled."""
    import json
    import shutil

    from bench import gpucode

    args = argparse.Namespace(quick=True, arch="sm_90", kernels="", threads=1, out=tmp_path)
    gpucode.run(args)
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    (path,) = tmp_path.glob("gpucode-sm_90-*.json")
    (kernel,) = json.loads(path.read_text())["results"]
    assert kernel["launches"] == 1 and kernel["spill_bytes"] == 0 and kernel["registers"] <= 64
    assert kernel.get("loads_128", 1) > 0
