"""SpMM over panels of rows on a CPU, against float64 sums; and what its loops are made of."""

import re

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsetir
from csr_zoo import check_spmm
from sparsetir.schedules.templates.spmm import RowBlocks
from sparsetir.schedules.templates.spmm_panels import PanelRows

RNG = np.random.default_rng(0)


def pruned(m, n, density=0.4):
    """A pattern with an empty row, a full one, and an empty column."""
    mask = RNG.random((m, n)) < density
    mask[1:2], mask[4:5], mask[:, 3:4] = False, True, False
    return sp.csr_array(mask.astype("float32"))


def check(matrix, config, feat, dtype="float32", threads=1, idtype=np.int32):
    return check_spmm(matrix, config, feat, dtype, "sum", threads, True, idtype)


@pytest.mark.parametrize(
    ("dtype", "config", "feat", "shape"),
    [
        ("float32", PanelRows(4, 64, pack=True), 128, (37, 41)),
        ("float32", PanelRows(3, 40, 16, 100), 100, (8, 9)),
        ("float64", PanelRows(5, 16, 8, 24, pack=True, blocks=3), 24, (26, 30)),
        ("float16", PanelRows(2, 32, 16), 32, (13, 20)),
        ("bfloat16", PanelRows(4, 7, 4, 7, pack=True), 7, (9, 12)),
        ("float32", PanelRows(4, 32, 16, compact=True, parallel=False), 64, (37, 41)),
        ("float64", PanelRows(7, 8, 8, 16, pack=True, blocks=3, compact=True), 16, (26, 30)),
    ],
    ids=str,
)
def test_types_and_tails(dtype, config, feat, shape):
    check(pruned(*shape), config, feat, dtype, threads=2)
    check(pruned(0, 5), config, feat, dtype)
    check(sp.csr_array((6, 9), dtype="float32"), config, feat, dtype)


def test_int64():
    check(pruned(11, 16), PanelRows(4, 16, parallel=False), 16, idtype=np.int64)


def test_values_of_a_run_are_read_by_their_places():
    """In panels of four rows and more; of fewer, rows by themselves take less time."""
    config = PanelRows(4, 32, pack=True, blocks=2)
    assert config.unpacked == PanelRows(4, 32, pack=True, blocks=2, packed=False)
    few = PanelRows(3, 32, pack=True, blocks=2)
    assert few.unpacked == few.by_rows == RowBlocks(32, 16, None, True, True, 0, 1, 2)
    assert config.compiled == PanelRows(4, 32, pack=True)
    plan = check(pruned(21, 30), config.unpacked, 64, threads=2)
    assert not plan.arranges_values and plan.repeats


def test_edges_in_any_order():
    """Operators on torch's tensors take panels where columns increase, and each is there once."""
    a = pruned(48, 200, 0.45)
    rows = np.repeat(np.arange(48), np.diff(a.indptr))
    edges = torch.from_numpy(np.stack([a.indices, rows])).long()
    b, values = torch.from_numpy(RNG.random((200, 32))), torch.from_numpy(RNG.random(a.nnz))
    twice = torch.cat([edges, edges[:, -9:]], dim=1), torch.cat([values, values[-9:]])
    turned = edges.flip(1), values.flip(0)
    for (given, weights), kind in (
        ((edges, values), PanelRows), (turned, RowBlocks), (twice, RowBlocks)
    ):  # fmt: skip
        found = sparsetir.ops.spmm((given, (200, 48)), b, values=weights)
        exact = sp.coo_array((weights, tuple(given.flip(0))), (48, 200)) @ b.numpy()
        np.testing.assert_allclose(found, exact, rtol=1e-12)
        structure = sparsetir.ops.structure_of(torch.zeros(49), given, 200)
        made = structure.plan("spmm", 32, torch.float64)
        assert type(made.config) is kind


def test_sums_stay_in_registers():
    """Each pattern has one loop; a row of B is loaded once in it for all of the pattern's rows."""
    config = PanelRows(4, 64, 16, 64, pack=True, parallel=False)
    plan = sparsetir.plan(
        "spmm", pruned(16, 16), 64, config=config, target={"kind": "llvm", "mcpu": "cascadelake"}
    )
    text = plan.kernel.source("asm")
    assert text.count("vfmadd") == 4 * 32  # 15 patterns of 32 rows in all, by 4 vectors
    loops = re.split(r"^\.LBB\S+:", re.sub(r"^\.Ltmp.*\n", "", text, flags=re.M), flags=re.M)
    found = [body for body in loops if "vfmadd" in body]
    # Two registers of a vector hold one feature of a row of B each; nothing is stored between.
    assert len(found) == 15
    for body in found:
        products = body.count("vfmadd")
        loads = len(re.findall(r"^\tv(?:movu|mova|fmadd\w)\S*\s.*\(", body, flags=re.M))
        assert (loads, body.count("vbroadcastss")) == (4, products // 4)
        assert not re.search(r"vmov\w+\s+%zmm\d+, .*\(", body.split("vfmadd")[-2])
