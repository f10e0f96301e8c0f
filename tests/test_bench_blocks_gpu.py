"""The bench of pruned weights on GPUs, as far as it runs without one: on the CPU in its place."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest
import torch

import sparsetir
from bench import blocks_gpu, cusparse_blocks
from bench.block_weights import KINDS, weight
from bench.blocks_gpu import DTYPES, FEATURES, OURS, Case, Device
from bench.peers import cusparse
from gpu_runner import requires_nvcc
from sparsetir.formats import DBSR, SRBCRS
from sparsetir.runtime.build import kernel_of
from sparsetir.runtime.pipeline import lower_template
from sparsetir.runtime.targets import resolve_target
from sparsetir.schedules.gpu.spmm_tensor_cores import TensorCores
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.templates.registry import TEMPLATES
from spmm_gpu_common import compile_cuda

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


@pytest.fixture
def case():
    matrix = sparsetir.SparseMatrix(weight(KINDS["blocks"], 128, 0.7))
    return Case.of(KINDS["blocks"], matrix, 24, "float32", Device.host())


@pytest.mark.parametrize("name", KINDS)
def test_weights(name):
    """As many numbers as were asked for, together as they were pruned."""
    kind = KINDS[name]
    found = weight(kind, 256, 0.75).toarray() != 0
    assert abs(found.mean() - 0.25) < 0.01
    rows, columns = kind.tile
    tiles = found.reshape(256 // rows, rows, 256 // columns, columns).any(3).any(1)
    assert tiles.mean() == found.mean()
    assert (~tiles.any(1)).mean() == pytest.approx(kind.empty, abs=0.01)


def test_peers_are_right_or_said_to_be_missing(case):
    found = blocks_gpu.compare(case, quick=True)
    assert set(found["peers"]) == {OURS, "dense", "torch"} and not found["wrong"]
    assert set(found["missing"]) == {"cusparse", "triton"}
    for peer in found["peers"].values():
        times = peer["variants"][peer["variant"]]
        assert times["median"] == peer["median"] > 0
    assert {*found["peers"]["torch"]["variants"]} == {"csr", "bsr"}
    formats = {fmt.name for fmt in KINDS["blocks"].formats}
    assert {*found["peers"][OURS]["variants"]} == formats


def test_wrong_results_are_not_timed(case, monkeypatch):
    ways = {
        "off": lambda i: torch.mm(case.dense, case.copies[i][0][0]) * 1.1,
        "nothing": lambda i: case.copies[i][1],
    }
    monkeypatch.setattr(blocks_gpu, "PEERS", {"dense": blocks_gpu.dense, "bad": lambda _: ways})
    found = blocks_gpu.compare(case, quick=True)
    assert set(found["peers"]) == {"dense"}
    assert set(found["wrong"]) == {"bad off", "bad nothing"}


def test_tables_and_files(tmp_path, capsys):
    peers = {"sparsetir": 2e-6, "dense": 8e-6, "triton": 4e-6}
    cell = {
        "kind": "blocks", "size": 256, "sparsity": 0.9, "dtype": "float16", "feat": 64,
        "peers": {n: {"median": t, "variant": "bsr"} for n, t in peers.items()},
        "missing": {"cusparse": "OSError: none"}, "wrong": {"torch csr": "3 are wrong"},
    }  # fmt: skip
    (line,) = blocks_gpu.summary([cell, cell])
    assert line["ratios"] == pytest.approx({"dense": 4, "triton": 2, "best": 2})
    blocks_gpu.show([cell])
    printed = capsys.readouterr().out
    assert "cusparse is missing: OSError: none" in printed and "wrong: torch csr" in printed
    where = {"gpu": "Stand-in", "threads": 1}
    blocks_gpu.record(tmp_path, where, [cell])
    (path,) = tmp_path.glob("blocks-stand-in-1t.json")
    assert json.loads(path.read_text())["results"]["cells"][0]["peers"]["dense"]["median"] == 8e-6


def test_cells_are_all_there(monkeypatch):
    """The most telling share of zeros first."""
    monkeypatch.setattr(blocks_gpu, "compare", lambda case, quick: {"of": case.stored is not None})
    found = list(blocks_gpu.cells(Device.host(), quick=True))
    assert [c["kind"] for c in found[::2]] == list(KINDS) and len(found) == 8
    assert {c["dtype"] for c in found} == set(DTYPES)
    assert [c["of"] for c in found[::2]] == [True, True, False, False]


def test_without_a_gpu_it_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    blocks_gpu.run(argparse.Namespace())
    assert capsys.readouterr().out == "no CUDA device: skipped\n"


# -- cuSPARSE -----------------------------------------------------------------------------------


class Library:
    """In place of cuSPARSE: notes what it is asked for, and has no blocked ELL by rows."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        if not name.startswith("cusparse") or name.endswith("preprocess"):
            raise AttributeError(name)
        return lambda *words: self.calls.append((name, words)) or 0


def test_what_cusparse_is_asked_for(case, monkeypatch):
    library = Library()
    monkeypatch.setattr(cusparse, "load", lambda: library)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, device=None, **rest: empty(*a, **rest))
    found = blocks_gpu.cusparse(case)
    assert set(found) == {f"{n} {t}" for n in ("BSR", "blocked ELL") for t in ("rows", "columns")}
    made = {name: words for name, words in library.calls if name.startswith("cusparseCreateB")}
    numbers = [w.value for w in made["cusparseCreateBsr"][1:6]]
    assert numbers == [4, 4, len(case.stored.indices), 32, 32]
    assert [w.value for w in made["cusparseCreateBlockedEll"][1:4]] == [128, 128, 32]


def test_blocked_ell(case):
    columns, values = cusparse_blocks.in_ell(torch, case.stored)
    dense = np.zeros((4, 32, 4, 32))
    for row, blocks in enumerate(columns.tolist()):
        for place, column in enumerate(blocks):
            if column >= 0:
                block = values.view(4, 32, -1, 32)[row, :, place]
                dense[row, :, column] = block.float().numpy()
    np.testing.assert_array_equal(dense.reshape(128, 128), case.dense.float().numpy())


# -- our kernels --------------------------------------------------------------------------------


def configs():
    """The configs of all cells."""
    formats = {fmt for kind in KINDS.values() for fmt in kind.formats}
    found = {
        TensorCores.for_features(fmt, feat, dtype): dtype
        for fmt in formats for feat in FEATURES for dtype in DTYPES
    }  # fmt: skip
    return [*found.items()]


def test_formats_have_configs():
    kinds = {type(c.format) for c, _ in configs()}
    assert {SRBCRS, DBSR} < kinds and len(kinds) == 3


@requires_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_kernels_compile(arch, tmp_path):
    target = resolve_target({"kind": "cuda", "arch": arch})
    for number, (config, dtype) in enumerate(configs()):
        stages = lower_template(TEMPLATES[TensorCores, Spmm], Spmm(dtype), config, target)
        folder = tmp_path / str(number)
        folder.mkdir()
        made = compile_cuda(kernel_of(stages, target).source("cuda"), folder, arch)
        assert made.spills <= 16, config
