"""The register tile of CPU kernels, and the fields of configs."""

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.operators.spmm import program
from sparsetir.schedules.registers import feature_tile, served, tasks
from sparsetir.schedules.templates import register_tile
from sparsetir.schedules.templates.shapes import row_reduction
from sparsetir.schedules.templates.spmm import RowBlocks


@pytest.mark.parametrize(("tiles_at", "pack"), [(None, False), (0, False), (0, True)])
@pytest.mark.parametrize("config", [
    RowBlocks(8, 4, parallel=False), RowBlocks(8, 4), RowBlocks(7, 4, 10), RowBlocks(8, 8, 12),
], ids=str)  # fmt: skip
def test_a_tile_gives_what_the_program_does(config, tiles_at, pack):
    """Interpreted before stage II, and run; threads share heads, tiles and blocks of rows."""
    feat = config.feat or 16
    matrix = sp.random_array((9, 7), density=0.4, format="csr", dtype="float32", rng=1)
    b = np.random.default_rng(2).standard_normal((7, feat)).astype("float32")

    def schedule(sch):
        found = row_reduction(sch, "test")
        blocks, rows = register_tile.in_blocks(sch, found.rows, config, 3)
        steps = register_tile.in_registers(
            sch, found, config, [rows], found.columns, shared=blocks, tiles_at=tiles_at, pack=pack,
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
        config = RowBlocks(*tile)
        assert config.tile <= lanes * vectors and config.tiles(feat) * config.tile >= feat
        assert tile.feat is None or tile.feat == served(feat, tile.tile, tile.lanes)
    assert tasks(8, 4) == 2 and tasks(8, 16) == 1 and tasks(8, 3, 4) == 32
