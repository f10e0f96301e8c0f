"""The bench of attention on GPUs, as far as it runs without one: on the CPU in its place."""

from __future__ import annotations

import argparse

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from bench import attention_gpu
from bench.attention import HEAD_SIZE, MASKS
from bench.attention_gpu import BSR, DENSE, OURS, UNFUSED, measure
from bench.blocks_gpu import Device
from bench.unfused import Unfused, scheduled
from gpu_runner import requires_nvcc
from sparsetir import masks
from sparsetir.runtime.build import kernel_of
from sparsetir.runtime.pipeline import lower
from sparsetir.runtime.targets import resolve_target
from spmm_gpu_common import compile_cuda


@pytest.mark.parametrize("name", MASKS)
def test_three_steps_are_right(name):
    """In blocks that are full and not."""
    mask = MASKS[name](256)
    q, k, v = (torch.randn(1, 2, 256, HEAD_SIZE) for _ in "qkv")
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask.to_dense())
    found = Unfused(mask, HEAD_SIZE, "float32", "llvm")(q, k, v)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_what_is_measured(monkeypatch):
    """Ways that have no gradients, and that are not there, are named."""
    make = attention_gpu.makers

    def few(*given):
        return {name: way for name, way in make(*given).items() if name != OURS}

    monkeypatch.setattr(attention_gpu, "makers", few)
    cell = measure("butterfly", "float32", 256, 2, (DENSE, BSR), Device.host(), quick=True)
    assert set(cell["forward"]) == {UNFUSED, DENSE} and not cell["wrong"]
    assert set(cell["backward"]) == {DENSE} and set(cell["no_gradient"]) == {UNFUSED}
    assert set(cell["missing"]) == {BSR} and cell["blocks"] and cell["elements"]
    assert set(cell["products"]) == {"sddmm", "sddmm dense", "spmm", "spmm dense"}
    assert all(t["median"] > 0 for t in cell["forward"].values())


@pytest.mark.slow  # kernels of attention for CPUs
@pytest.mark.parametrize("name", ["band", "butterfly"])
def test_ways_are_right(name):
    cell = measure(name, "float32", 256, 2, (DENSE, BSR), Device.host(), quick=True)
    assert set(cell["forward"]) == {OURS, UNFUSED, DENSE} and not cell["wrong"]
    assert set(cell["backward"]) == {OURS, DENSE} and set(cell["no_gradient"]) == {UNFUSED}


def test_wrong_results_are_not_timed(monkeypatch):
    ways = {OURS: lambda: lambda q, k, v: q, DENSE: lambda: lambda q, k, v: q * torch.nan}
    monkeypatch.setattr(attention_gpu, "makers", lambda *_: ways)
    cell = measure("band", "bfloat16", 256, 1, (), Device.host(), quick=True)
    assert set(cell["wrong"]) == {OURS, DENSE} and cell["forward"] == cell["backward"] == {}


def test_blocks_that_stick_out_are_refused():
    with pytest.raises(ValueError, match="blocks of 64 stick out of"):
        Unfused(masks.band(100, 8), 64, "float32", "llvm")


def test_tables(capsys):
    times = {"sparsetir": {"median": 2e-6}, "dense": {"median": 1e-5}}
    cell = {
        "mask": "band", "dtype": "float16", "blocks": 18, "forward": times,
        "backward": {"dense": times["dense"]}, "products": {"spmm": {"median": 3e-6}},
        "missing": {"torch bsr": "none"}, "no_gradient": {}, "wrong": {"flex 64": "by 2"},
    }  # fmt: skip
    attention_gpu.show([cell])
    printed = capsys.readouterr().out
    assert "band  float16      18   2 (1.00)  10 (5.00)" in printed
    assert "torch bsr is missing: none" in printed and "wrong: flex 64, band" in printed


def test_without_a_gpu_it_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    attention_gpu.run(argparse.Namespace())
    assert capsys.readouterr().out == "no CUDA device: skipped\n"


@requires_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_kernels_of_three_steps_compile(arch, tmp_path):
    target = resolve_target({"kind": "cuda", "arch": arch})
    for name, (_, program, apply, config) in scheduled(64, 64, "bfloat16").items():
        stages = lower(program, apply, config, target)
        folder = tmp_path / name
        folder.mkdir()
        made = compile_cuda(kernel_of(stages, target).source("cuda"), folder, arch)
        assert made.spills <= 16, name
