"""Default configs of problems, register tiles, and the locality of the rows that are used."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import tvm

import sparsetir
from machines import MACHINES
from sparsetir.formats import BSR
from sparsetir.machine import assume
from sparsetir.planning.plan import requested
from sparsetir.schedules.gpu.spmm import RowSplit
from sparsetir.schedules.gpu.spmm_groups import Groups
from sparsetir.schedules.gpu.spmm_hyb import HybRows
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.operators.spmm import program
from sparsetir.schedules.registers import feat_field, feature_tile, tasks
from sparsetir.schedules.search.choose import Statistics, candidates, choose
from sparsetir.schedules.search.locality import STEPS, Locality
from sparsetir.schedules.targets import l3_bytes, vector_bits
from sparsetir.schedules.templates import register_tile
from sparsetir.schedules.templates.row_tile import RowTile
from sparsetir.schedules.templates.shapes import row_reduction
from sparsetir.schedules.templates.spmm_blocks import BlockRows
from sparsetir.sparse_ir.recipes.locality import FEW, MISSED, reuse_distance

X86 = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "icelake-server"}
CPU = tvm.target.Target(X86)
GPU = tvm.target.Target({"kind": "cuda", "arch": "sm_90"})
AVX2 = tvm.target.Target({**X86, "mcpu": "znver3"})
ZEN_3 = MACHINES["no AVX-512"]
GRAPH = Statistics(m=10**5, n=10**5, nnz=10**6, feat=128, threads=4, longest=40)


def test_panels_where_rows_of_b_are_read_often():
    assert not choose(Spmm(), GRAPH, CPU).pack
    assert choose(Spmm(), replace(GRAPH, nnz=10**7), CPU).pack
    # Of rows of 64 features the L3 cache holds half, or all.
    rows = l3_bytes() // 2 // 256 + 1
    few = replace(GRAPH, m=rows, n=rows, nnz=30 * rows, threads=1, feat=64)
    assert choose(Spmm(), few, CPU) == RowTile(32, 16, pack=True, parallel=False)
    for other in ({"feat": 48}, {"n": 10 * rows, "nnz": 300 * rows}, {"n": rows // 2}):
        assert not choose(Spmm(), replace(few, **other), CPU).pack


def test_panels_of_fewer_nonzeros_where_whole_rows_miss_a_cache():
    rows = l3_bytes() // 4096
    short = replace(GRAPH, m=rows, n=rows, nnz=12 * rows, feat=512, threads=1)
    band, random = (Locality((1.0,) * held + (0.0,) * 6) for held in (4, 16))
    panels = RowTile(64, 16, pack=True, parallel=False)
    assert choose(Spmm(), replace(short, locality=band), CPU) == panels
    assert choose(Spmm(), replace(short, locality=random), CPU) == replace(panels, prefetch=16)
    for other in ({"feat": 256, "locality": random}, {"nnz": 9 * rows, "locality": band}):
        assert not choose(Spmm(), replace(short, **other), CPU).pack


def test_panels_on_a_cpu_with_narrow_registers_and_a_small_cache():
    """Zen 3: of four vectors, for rows of half the length, and for fewer nonzeros."""
    graph = replace(GRAPH, m=25_000, n=25_000, nnz=8 * 25_000, threads=1)
    panels = RowTile(32, 8, pack=True, parallel=False, prefetch=16)
    with assume(ZEN_3):
        assert choose(Spmm(), replace(graph, feat=256), AVX2) == panels
        assert choose(Spmm(), replace(graph, feat=64, nnz=30 * 25_000), AVX2) == panels
        small = {"m": 5_000, "n": 5_000, "nnz": 40_000}
        for other in ({"feat": 64}, {"nnz": 6 * 25_000}, {"m": 250_000}, small):
            assert not choose(Spmm(), replace(graph, **{"feat": 256, **other}), AVX2).pack


def test_long_rows_that_the_l3_cache_holds_are_not_prefetched():
    rows = replace(GRAPH, m=4_000, n=4_000, nnz=16_000, threads=1)
    with assume(ZEN_3):
        ahead = [choose(Spmm(), replace(rows, feat=x), AVX2).prefetch for x in (128, 256, 512)]
    assert ahead == [16, 8, 0]


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
        group = 32 if feat <= 4 else 8  # a warp, if a thread has all columns
        wanted = Groups.for_features(feat, split="non-zeros", group=group)
        assert isinstance(choose(problem, few, GPU), RowSplit)
        assert choose(problem, uneven, GPU) == wanted
        assert isinstance(choose(problem, replace(uneven, feat=16), GPU), RowSplit | HybRows)
    # There are no atomics for these.
    for problem in (Spmm("float16"), Spmm("float64", reduce="max")):
        uneven = replace(GRAPH, feat=1, longest=5000)
        assert isinstance(choose(problem, uneven, GPU), RowSplit | HybRows)


BLOCKED = Statistics(m=1024, n=1024, nnz=10**5, feat=512, block=32)


PRUNED = Statistics(m=512, n=1024, nnz=512 * 1024 // 5, feat=128)


def test_panels_of_rows_that_share_columns():
    mesh = Statistics(m=5000, n=2000, nnz=250_000, feat=128, shared=3.0)
    config = choose(Spmm(), mesh, CPU)
    assert (config.rows, config.pack, config.unpacked.rows) == (4, True, 4)
    for other in ({"shared": 1.5}, {"feat": 24}, {"n": 10**5}):
        assert not choose(Spmm(), replace(mesh, **other), CPU).in_row_panels
    few_registers = tvm.target.Target({**X86, "mcpu": "haswell"})
    assert not choose(Spmm(), mesh, few_registers).in_row_panels
    assert choose(Spmm(), replace(mesh, feat=16), few_registers).in_row_panels


def test_plans_measure_columns_in_common_of_long_rows():
    rows = np.repeat(np.sort(np.argsort(RNG.random((100, 300)))[:, :30]), 4, axis=0)
    for matrix, shared in ((rows, 4), (rows[RNG.permutation(400)], 1), (rows[:, :20], 1)):
        indptr = np.arange(401) * matrix.shape[1]
        a = sp.csr_array((np.ones(matrix.size, "float32"), matrix.ravel(), indptr), (400, 300))
        statistics = requested("spmm", sparsetir.SparseMatrix(a), 64).statistics
        assert round(statistics.shared) == shared


def test_panels_of_pruned_weights():
    """Depends on the density, the elements of a row, and the features."""
    config = choose(Spmm(), PRUNED, CPU)
    assert config == RowTile(64, 16, rows=4, pack=True, parallel=False)
    narrow = choose(Spmm(), replace(PRUNED, feat=40), CPU)
    assert narrow == RowTile(40, 16, 40, rows=4, pack=True, parallel=False)
    assert choose(Spmm("float64"), replace(PRUNED, bytes=8), CPU).tile == 32
    assert choose(Spmm(), replace(PRUNED, n=2048, nnz=512 * 500), CPU).rows == 5
    # With a feature that it has, so that it is never the machine of tests.
    zen = tvm.target.Target({**X86, "mcpu": "znver5", "mattr": ["+avx512f"]})
    larger = [replace(PRUNED, n=512, nnz=512 * length) for length in (90, 150, 250)]
    assert [choose(Spmm(), stats, zen).rows for stats in larger] == [4, 5, 6]
    narrow = [replace(stats, feat=32) for stats in larger]
    assert [choose(Spmm(), stats, zen).rows for stats in narrow] == [4, 5, 5]
    large = Statistics(m=65536, n=512, nnz=65536 * 110, feat=512)
    assert choose(Spmm(), large, zen).in_row_panels
    assert not choose(Spmm(), large, CPU).in_row_panels
    small = Statistics(m=256, n=64, nnz=256 * 32, feat=64)
    assert choose(Spmm(), small, CPU).rows == 3
    for rows in (
        replace(PRUNED, nnz=512 * 1024 // 20), replace(PRUNED, n=128, nnz=512 * 25),
        replace(PRUNED, feat=16), replace(PRUNED, m=8, nnz=8 * 100), GRAPH,
    ):  # fmt: skip
        assert not choose(Spmm(), rows, CPU).in_row_panels
    for problem in (Spmm(batched=True), Spmm(reduce="max")):
        assert not choose(problem, PRUNED, CPU).in_row_panels
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
    """Chosen where the matrix consists of blocks, and features fill a vector."""
    config = choose(Spmm(), BLOCKED, CPU)
    assert config == BlockRows(BSR(32, 32), parallel=False, pack=True)
    for other in (replace(BLOCKED, block=1), replace(BLOCKED, feat=8)):
        assert isinstance(choose(Spmm(), other, CPU), RowTile)
    for problem in (Spmm(reduce="mean"), Spmm(batched=True)):
        assert isinstance(choose(problem, BLOCKED, CPU), RowTile)
    assert isinstance(choose(Spmm(), BLOCKED, GPU), RowSplit)


@pytest.mark.parametrize(("tiles_at", "pack"), [(None, False), (0, False), (0, True)])
@pytest.mark.parametrize("config", [
    RowTile(8, 4, parallel=False), RowTile(8, 4), RowTile(7, 4, 10), RowTile(8, 8, 12),
], ids=str)  # fmt: skip
def test_a_tile_gives_what_the_program_does(config, tiles_at, pack):
    """Interpreted before stage II, and run; threads share heads, tiles and blocks of rows."""
    feat = config.feat or 16
    matrix = sp.random_array((9, 7), density=0.4, format="csr", dtype="float32", rng=1)
    b = np.random.default_rng(2).standard_normal((7, feat)).astype("float32")

    def schedule(sch):
        shape = row_reduction(sch, "test")
        blocks, rows = register_tile.in_blocks(sch, shape.rows, config, 3)
        steps = register_tile.in_registers(
            sch, shape, config, [rows], shape.columns, shared=blocks, tiles_at=tiles_at, pack=pack,
            dtype="float32",
        )  # fmt: skip
        staged.append(sch.func)
        register_tile.straight_code(sch, steps)

    staged = []
    kernel = sparsetir.build(program(Spmm()), schedule=schedule)
    args = {
        "a": matrix.data, "b": b, "indptr": matrix.indptr.astype("int32"),
        "indices": matrix.indices.astype("int32"), "m": 9, "n": 7, "nnz": matrix.nnz, "feat": feat,
    }  # fmt: skip
    for run in (lambda **all: sparsetir.interpret(staged[0], all), kernel):
        out = np.full((9, feat), np.nan, "float32")
        run(**args, out=out)
        np.testing.assert_allclose(out, matrix @ b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize("vectors", [1, 4, 16])
def test_tiles_of_features_are_about_as_wide_and_serve_their_number(lanes, vectors):
    for feat in range(1, 600):
        tile = feature_tile(feat, lanes, vectors)
        config = RowTile(*tile)
        assert config.tile <= lanes * vectors and config.tiles(feat) * config.tile >= feat
        assert tile.feat is None or tile.feat == feat_field(feat, tile.tile, tile.lanes)
    assert tasks(8, 4) == 2 and tasks(8, 16) == 1 and tasks(8, 3, 4) == 32


RNG = np.random.default_rng(0)
ROUNDED = 1 / STEPS


def exact(columns, rows):
    """Share of the nonzeros of the second half that a cache of so many rows misses, LRU."""
    held, misses, half = [], 0, len(columns) // 2
    for use, column in enumerate(columns.tolist()):
        if column in held:
            held.remove(column)
        elif use >= half:
            misses += 1
        held = [*held[-(rows - 1) :], column]
    return misses / (len(columns) - half)


@pytest.mark.parametrize("rows", [8, 64, 256])
@pytest.mark.parametrize("name", ["random", "band", "one column", "a cycle", "skewed"])
def test_as_a_cache_that_forgets_what_was_used_longest_ago(name, rows):
    size = 4096
    columns = {
        "random": RNG.integers(0, 300, size),
        "band": np.arange(size) // 16 + RNG.integers(0, 40, size),
        "one column": np.zeros(size, int),
        "a cycle": np.arange(size) % 100,
        "skewed": np.minimum(RNG.geometric(0.02, size), 4000),
    }[name].astype("int32")
    misses = Locality.of(columns).missed(rows)
    assert abs(misses - exact(columns, rows)) < ROUNDED + 0.05


@pytest.mark.parametrize("size", [FEW, 100_000, 1_000_000])
def test_reuse_distances(size):
    """A cache of so many rows misses about so many uses; one of a quarter misses more."""
    place = np.arange(size)
    for spread in (100, 1000, 3000):
        columns = (place // 40 + RNG.integers(0, spread, size)).astype("int32")
        rows = reuse_distance(columns)
        if rows == size:  # the sample is too short
            assert size == FEW and spread == 3000
            continue
        locality = Locality.of(columns)
        assert locality.missed(4 * rows) <= MISSED + 0.1 and locality.missed(rows // 4) > MISSED
    assert reuse_distance(np.zeros(size, "int32")) <= 1
    assert reuse_distance(RNG.integers(0, 10**6, size)) == size


def test_what_fits_is_not_missed():
    fits = Statistics(m=100, n=100, nnz=5000, feat=32)
    assert fits.missed(128, 1 << 20) == 0 and fits.missed(128, 1 << 10) == 1
    near = Statistics(m=100, n=100, nnz=5000, feat=32, locality=Locality((0.5, 0.25)))
    assert near.missed(128, 1 << 10) == 0.5 and near.missed(128, 1 << 11) == 0.25
    assert not Statistics(m=100, n=10**6, nnz=0, feat=32).asks_for_locality
