"""SpMM and SpMV on the CPU: every config against float64 sums, on the zoo of patterns."""

import re

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsetir
from csr_zoo import ZOO, check_spmm, random
from pairs import by_turns
from sparsetir.formats import BSR, DBSR
from sparsetir.reductions import REDUCERS
from sparsetir.schedules.templates.row_tile import RowTile
from sparsetir.schedules.templates.spmm_blocks import BlockRows

RNG = np.random.default_rng(0)
X86 = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "cascadelake"}


def check(a, feat, dtype="float32", reduce="sum", config=None, threads=2):
    check_spmm(a, config, feat, dtype, reduce, threads)


@pytest.mark.parametrize("name", by_turns(ZOO, 2))
@pytest.mark.parametrize("reduce", REDUCERS)
def test_patterns(name, reduce):
    check(ZOO[name], 20, reduce=reduce)
    if REDUCERS[reduce].steps is not None:
        return check_spmm(ZOO[name], None, 9, "float64", reduce, 2, True, "int64")
    config = RowTile(tile=32, pack=True, parts=3, blocks=2)
    check(ZOO[name], 32, reduce=reduce, config=config)
    return None


@pytest.mark.parametrize(
    "feat", by_turns([1, 2, 3, 7, 15, 16, 17, 33, 100, 129, 257, 600, 1023, 1024], 3)
)
@pytest.mark.default("7", "17", "1023")
def test_feature_sizes(feat):
    check(ZOO["random"], feat)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.default("float16", "float64")
def test_dtypes(dtype):
    for reduce in REDUCERS:
        check(ZOO["empty rows"], 24, dtype, reduce)


CONFIGS = [
    RowTile(tile=64, blocks=7),
    RowTile(tile=32, parts=5),
    RowTile(tile=16, lanes=8, prefetch=1),
    RowTile(tile=20, lanes=16, feat=64, pack=True),
    RowTile(tile=13, lanes=4, feat=64, prefetch=0, blocks=3),
    RowTile(tile=4, lanes=4, feat=64, pack=True, parts=2, blocks=2),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_configs(config):
    for name in ("random", "empty rows", "one dense row", "empty"):
        check(ZOO[name], 64, config=config, threads=3)


@pytest.mark.parametrize("reduce", ["sum", "max", "min"])
def test_what_is_not_finite(reduce):
    """Only stored elements meet what B holds, and NaN and inf stay what they are."""
    a = sp.csr_array(([1.0, 0.0, -1.0], ([0, 0, 2], [0, 1, 2])), shape=(4, 5), dtype="float32")
    b = np.full((5, 18), np.nan, "float32")
    b[0], b[1], b[2] = 2.0, 3.0, np.inf
    out = sparsetir.plan("spmm", a, 18, reduce=reduce)(b)
    assert (
        (out[0] == (0 if reduce == "min" else 2)).all()
        and (out[1] == 0).all()
        and (out[3] == 0).all()
    )
    assert (out[2] == -np.inf).all()
    b[1, 3] = np.inf  # times the stored zero: NaN
    out = sparsetir.plan("spmm", a, 18, reduce=reduce)(b)
    assert np.isnan(out[0, 3]) and np.isfinite(np.delete(out[0], 3)).all()


def test_the_code_keeps_a_tile_in_registers():
    """The loop over nonzeros neither loads nor stores an accumulator, and prefetches rows."""

    target = X86  # for others LLVM may write loops out twice
    plan = sparsetir.plan("spmm", ZOO["random"], 128, config=RowTile(prefetch=8), target=target)
    code = plan.kernel.source("ll")
    loop = next(part for part in re.split(r"\n(?=\S+:)", code) if "llvm.prefetch" in part)
    assert len(re.findall(r"call void @llvm.prefetch", loop)) == 8
    assert "store" not in loop


FEW = ("random", "empty rows", "one dense row", "empty", "no rows", "one column")


SORTED = [
    (RowTile(32, 16, 32, window=7, tiles_first=False), "float32", 32, "int32", "sum"),
    (
        RowTile(16, 8, blocks=3, ahead=9, window=99, tiles_first=False),
        "float32",
        48,
        "int32",
        "mean",
    ),
    (RowTile(9, 4, 9, parallel=False, window=99, tiles_first=False), "float64", 9, "int64", "sum"),
    (RowTile(8, 8, 11, window=99, tiles_first=False), "float16", 11, "int32", "sum"),
    (RowTile(4, 4, blocks=2, window=99, tiles_first=False), "bfloat16", 4, "int32", "max"),
]
PANELS = [
    (RowTile(64, rows=4, pack=True), "float32", 128, "int32"),
    (RowTile(40, 16, 100, rows=3), "float32", 100, "int32"),
    (RowTile(16, 8, 24, rows=5, pack=True, blocks=3), "float64", 24, "int32"),
    (RowTile(32, 16, rows=2), "float16", 32, "int32"),
    (RowTile(7, 4, 7, rows=4, pack=True), "bfloat16", 7, "int32"),
    (RowTile(16, rows=4, parallel=False), "float32", 16, "int64"),
]


@pytest.mark.parametrize("case", by_turns([(case,) for case in SORTED], 2), ids=str)
def test_types_and_tails(case):
    """Values that are planned with, and those of a run; infinities and NaN as sums say."""
    config, dtype, feat, idtype, reduce = case
    for name in FEW:
        check_spmm(ZOO[name], config, feat, dtype, reduce, 2, reduce != "max", idtype)


@pytest.mark.parametrize("case", by_turns([(case,) for case in PANELS], 2), ids=str)
@pytest.mark.default(2)
def test_types_and_tails_of_panels(case):
    config, dtype, feat, idtype = case
    for name in FEW:
        check_spmm(ZOO[name], config, feat, dtype, special=True, idtype=idtype)


def test_edges_in_any_order():
    """Operators on torch's tensors take panels where columns increase, and each is there once."""
    a = random(48, 200, 0.45)
    rows = np.repeat(np.arange(48), np.diff(a.indptr))
    edges = torch.from_numpy(np.stack([a.indices, rows])).long()
    b, values = torch.from_numpy(RNG.random((200, 32))), torch.from_numpy(RNG.random(a.nnz))
    twice = torch.cat([edges, edges[:, -9:]], dim=1), torch.cat([values, values[-9:]])
    turned = edges.flip(1), values.flip(0)
    for (order, weights), in_row_panels in (
        ((edges, values), True),
        (turned, False),
        (twice, False),
    ):
        result = sparsetir.ops.spmm((order, (200, 48)), b, values=weights)
        exact = sp.coo_array((weights, tuple(order.flip(0))), (48, 200)) @ b.numpy()
        np.testing.assert_allclose(result, exact, rtol=1e-12)
        structure = sparsetir.ops.structure_of(torch.zeros(49), order, 200)
        plan = structure.plan("spmm", 32, torch.float64)
        assert plan.config.in_row_panels == in_row_panels


def test_sums_stay_in_registers():
    """Each pattern has one loop, which loads a row of B once for all of the pattern's rows."""
    config = RowTile(64, 16, 64, rows=4, pack=True, parallel=False)
    plan = sparsetir.plan("spmm", random(16, 16, 0.4), 64, config=config, target=X86)
    text = plan.kernel.source("asm")
    assert text.count("vfmadd") == 4 * 32  # 15 patterns of 32 rows in all, by 4 vectors
    loops = re.split(r"^\.LBB\S+:", re.sub(r"^\.Ltmp.*\n", "", text, flags=re.M), flags=re.M)
    bodies = [body for body in loops if "vfmadd" in body]
    # Two registers of a vector hold one feature of a row of B each; nothing is stored between.
    assert len(bodies) == 15
    for body in bodies:
        products = body.count("vfmadd")
        loads = len(re.findall(r"^\tv(?:movu|mova|fmadd\w)\S*\s.*\(", body, flags=re.M))
        assert (loads, body.count("vbroadcastss")) == (4, products // 4)
        assert not re.search(r"vmov\w+\s+%zmm\d+, .*\(", body.split("vfmadd")[-2])


def block_mask(high, wide, rows, cols, fill=0.4):
    """Whole blocks, some rows of blocks empty, one full."""
    mask = RNG.random((high, wide)) < fill
    mask[:1], mask[1:2] = False, True
    return np.kron(mask, np.ones((rows, cols), bool))


def scattered(shape, density=0.1):
    """Blocks that are not full, the last ones sticking out."""
    mask = RNG.random(shape) < density
    mask[3:7] = False
    return mask


def check_blocks(mask, config, feat, dtype="float32", threads=2, special=False):
    matrix = sp.csr_array(mask.astype("float32"))
    return check_spmm(matrix, config, feat, dtype, "sum", threads, special)


CASES = [
    (fmt(r, c), rows, tile, feat, dtype)
    for fmt in (BSR, DBSR)
    for r, c, rows in ((8, 8, 4), (16, 8, 8), (4, 6, 2), (32, 32, 4), (3, 5, 3))
    for tile, feat in ((32, 64), (64, 100), (24, 24), (7, 7))
    for dtype in ("float32", "bfloat16", "float16", "float64")
]


@pytest.mark.parametrize("fmt, rows, tile, feat, dtype", by_turns(CASES, 90), ids=str)
def test_blocks(fmt, rows, tile, feat, dtype):
    """Full blocks without masks, others with them, in one thread and in several."""
    lanes = min(16, 1 << (tile.bit_length() - 1))
    size = None if feat % tile == 0 and tile % lanes == 0 else feat
    for pack, parallel in ((True, False), (False, True)):
        blocks = 2 if parallel and isinstance(fmt, BSR) else 1
        config = BlockRows(fmt, rows, tile, lanes, size, True, pack, blocks, parallel)
        for shape in ((5, 4), (2, 1)):
            check_blocks(block_mask(*shape, fmt.rows, fmt.cols), config, feat, dtype)
    config = BlockRows(fmt, rows, tile, lanes, size, False)
    check_blocks(scattered((37, 41)), config, feat, dtype, special=True)
    check_blocks(np.zeros((6, 9), bool), config, feat, dtype)


def test_no_rows():
    check_blocks(np.zeros((0, 8), bool), BlockRows(BSR(8, 8)), 64)
