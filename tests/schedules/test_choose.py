"""What problems get when their users name no config."""

from dataclasses import replace

import pytest
import tvm

from sparsetir.formats import BSR
from sparsetir.schedules.default import vector_bits
from sparsetir.schedules.gpu.spmm import RowSplit
from sparsetir.schedules.gpu.spmm_groups import Groups
from sparsetir.schedules.gpu.spmm_hyb import HybRows
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.search.choose import Statistics, candidates, choose
from sparsetir.schedules.templates.spmm import RowBlocks
from sparsetir.schedules.templates.spmm_blocks import BlockRows
from sparsetir.schedules.templates.spmm_panels import PanelRows

CPU = tvm.target.Target({"kind": "llvm", "mcpu": "icelake-server"})
GPU = tvm.target.Target({"kind": "cuda", "arch": "sm_90"})
GRAPH = Statistics(m=10**5, n=10**5, nnz=10**6, feat=128, threads=4, longest=40)


def test_panels_where_rows_of_b_are_read_often():
    assert not choose(Spmm(), GRAPH, CPU).pack
    assert choose(Spmm(), replace(GRAPH, nnz=10**7), CPU).pack


def test_tiles_and_blocks_keep_all_threads_busy():
    for config in candidates(Spmm(), replace(GRAPH, nnz=10**7), CPU):
        tasks = config.blocks * (config.tiles(128) if config.tiles_first else 1)
        assert tasks % 4 == 0


def test_hyb_where_rows_are_uneven():
    assert isinstance(choose(Spmm(), GRAPH, GPU), RowSplit)
    uneven = replace(GRAPH, longest=5000)
    assert choose(Spmm(), uneven, GPU) == HybRows.for_features(128, k=4)
    assert isinstance(choose(Spmm(reduce="max"), uneven, GPU), RowSplit)
    assert isinstance(choose(Spmm(batched=True), uneven, GPU), RowSplit)


def test_half_precision_gets_whole_rows():
    """A bucket for the longest row, or no hyb where that takes too many buckets."""
    uneven = replace(GRAPH, longest=600)
    assert choose(Spmm("float16"), uneven, GPU) == HybRows.for_features(128, "float16", k=10)
    uneven = replace(GRAPH, longest=5000)
    assert choose(Spmm("float16"), uneven, GPU) == RowSplit.for_features(128, "float16")


def test_a_non_zero_each_where_rows_are_uneven_and_features_few():
    sums = ((Spmm(), 1), (Spmm(reduce="mean"), 2), (Spmm(batched=True), 8))
    for problem, feat in (*sums, (Spmm(reduce="max"), 1)):
        few = replace(GRAPH, feat=feat)
        uneven = replace(few, longest=5000)
        wanted = Groups.for_features(feat, split="non-zeros", group=32)
        assert isinstance(choose(problem, few, GPU), RowSplit)
        assert choose(problem, uneven, GPU) == wanted
        assert isinstance(choose(problem, replace(uneven, feat=16), GPU), RowSplit | HybRows)
    # There are no atomics for these.
    for problem in (Spmm("float16"), Spmm("float64", reduce="max")):
        uneven = replace(GRAPH, feat=1, longest=5000)
        assert isinstance(choose(problem, uneven, GPU), RowSplit | HybRows)


BLOCKED = Statistics(m=1024, n=1024, nnz=10**5, feat=512, block=32)


PRUNED = Statistics(m=512, n=1024, nnz=512 * 1024 // 5, feat=128)


def test_panels_of_pruned_weights():
    """By what is stored, how many elements a row has, and features."""
    found = choose(Spmm(), PRUNED, CPU)
    assert found == PanelRows(4, 64, 16, pack=True, parallel=False)
    narrow = choose(Spmm(), replace(PRUNED, feat=40), CPU)
    assert narrow == PanelRows(4, 40, 16, 40, pack=True, parallel=False)
    assert choose(Spmm("float64"), replace(PRUNED, bytes=8), CPU).tile == 32
    assert choose(Spmm(), replace(PRUNED, n=2048, nnz=512 * 500), CPU).rows == 5
    zen = tvm.target.Target({"kind": "llvm", "mcpu": "znver5"})
    larger = [replace(PRUNED, n=512, nnz=512 * length) for length in (90, 150, 250)]
    assert [choose(Spmm(), given, zen).rows for given in larger] == [4, 5, 6]
    assert choose(Spmm(), replace(PRUNED, feat=32), zen).rows == 4
    large = Statistics(m=65536, n=512, nnz=65536 * 110, feat=512)
    assert isinstance(choose(Spmm(), large, zen), PanelRows)
    assert isinstance(choose(Spmm(), large, CPU), RowBlocks)
    small = Statistics(m=256, n=64, nnz=256 * 32, feat=64)
    assert choose(Spmm(), small, CPU).rows == 3
    for rows in (
        replace(PRUNED, nnz=512 * 1024 // 20), replace(PRUNED, n=128, nnz=512 * 25),
        replace(PRUNED, feat=16), replace(PRUNED, m=8, nnz=8 * 100), GRAPH,
    ):  # fmt: skip
        assert isinstance(choose(Spmm(), rows, CPU), RowBlocks)
    for problem in (Spmm(batched=True), Spmm(reduce="max")):
        assert isinstance(choose(problem, PRUNED, CPU), RowBlocks)
    in_threads = choose(Spmm(), replace(PRUNED, threads=4, feat=512), CPU)
    assert in_threads.parallel and in_threads.blocks * in_threads.tiles(512) % 4 == 0


@pytest.mark.parametrize(
    ("cpu", "bits"), [("cascadelake", 512), ("haswell", 256), ("znver3", 256), ("x86-64", 128)]
)
def test_vectors_are_as_wide_as_the_registers_of_a_cpu(cpu, bits):
    target = tvm.target.Target({"kind": "llvm", "mcpu": cpu, "mtriple": "x86_64-linux-gnu"})
    assert vector_bits(target) == bits
    graph = choose(Spmm(), replace(GRAPH, feat=100), target)
    assert graph.lanes == bits // 32


def test_full_blocks():
    """Where the matrix is made of them, and features fill a vector."""
    found = choose(Spmm(), BLOCKED, CPU)
    assert found == BlockRows(BSR(32, 32), parallel=False, pack=True)
    for other in (replace(BLOCKED, block=1), replace(BLOCKED, feat=8)):
        assert isinstance(choose(Spmm(), other, CPU), RowBlocks)
    for problem in (Spmm(reduce="mean"), Spmm(batched=True)):
        assert isinstance(choose(problem, BLOCKED, CPU), RowBlocks)
    assert isinstance(choose(Spmm(), BLOCKED, GPU), RowSplit)
