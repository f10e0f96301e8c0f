"""SpMM over blocks on a CPU, against float64 sums."""

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from csr_zoo import check_spmm
from pairs import by_turns
from sparsetir.formats import BSR, DBSR
from sparsetir.schedules.templates.spmm_blocks import BlockRows

RNG = np.random.default_rng(0)


def of_blocks(high, wide, rows, cols, fill=0.4):
    """Whole blocks, some rows of blocks empty, one full."""
    mask = RNG.random((high, wide)) < fill
    mask[:1], mask[1:2] = False, True
    return np.kron(mask, np.ones((rows, cols), bool))


def scattered(shape, density=0.1):
    """Blocks that are not full, the last ones sticking out."""
    mask = RNG.random(shape) < density
    mask[3:7] = False
    return mask


def check(mask, config, feat, dtype="float32", threads=2, special=False):
    matrix = sp.csr_array(mask.astype("float32"))
    return check_spmm(matrix, config, feat, dtype, "sum", threads, special)


CASES = [
    (fmt(r, c), rows, tile, feat, dtype)
    for fmt in (BSR, DBSR)
    for r, c, rows in ((8, 8, 4), (16, 8, 8), (4, 6, 2), (32, 32, 4), (3, 5, 3))
    for tile, feat in ((32, 64), (64, 100), (24, 24), (7, 7))
    for dtype in ("float32", "bfloat16", "float16", "float64")
]


@pytest.mark.parametrize("fmt, rows, tile, feat, dtype", by_turns(CASES, 41), ids=str)
def test_blocks(fmt, rows, tile, feat, dtype):
    """Full blocks without masks, others with them, in one thread and in several."""
    lanes = min(16, 1 << (tile.bit_length() - 1))
    size = None if feat % tile == 0 and tile % lanes == 0 else feat
    for pack, parallel in ((True, False), (False, True)):
        blocks = 2 if parallel and isinstance(fmt, BSR) else 1
        config = BlockRows(fmt, rows, tile, lanes, size, True, pack, blocks, parallel)
        for shape in ((5, 4), (2, 1)):
            check(of_blocks(*shape, fmt.rows, fmt.cols), config, feat, dtype)
    config = BlockRows(fmt, rows, tile, lanes, size, False)
    check(scattered((37, 41)), config, feat, dtype, special=True)
    check(np.zeros((6, 9), bool), config, feat, dtype)


def test_no_rows():
    check(np.zeros((0, 8), bool), BlockRows(BSR(8, 8)), 64)


def test_one_kernel_for_all_patterns_of_full_blocks():
    before = sparsetir.compilations()
    for high in (1, 3, 6):
        for blocks in (1, 3):
            check(of_blocks(high, 4, 8, 16), BlockRows(BSR(8, 16), 8, 32, blocks=blocks), 96)
    assert sparsetir.compilations() - before <= 1
