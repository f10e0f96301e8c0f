"""Configs as JSON data, and back."""

import json

import pytest

from sparsetir.formats import (
    BSR,
    COO,
    CSC,
    CSF,
    CSR,
    DBSR,
    DCSR,
    DIA,
    ELL,
    SELL,
    SRBCRS,
    EnumeratedPatterns,
    Hyb,
    Mixture,
    Ragged,
    RelationalHyb,
    RowELL,
    by_band,
)
from sparsetir.formats.format import REGISTRY
from sparsetir.schedules.gpu.block_attention import WarpTiles
from sparsetir.schedules.gpu.rgms import RelationalRows
from sparsetir.schedules.gpu.rgms_gradients import GradientTiles
from sparsetir.schedules.gpu.rgms_tensor_cores import RelationalTensorCores
from sparsetir.schedules.gpu.sddmm import FusedNonzeros
from sparsetir.schedules.gpu.spmm import RowSplit
from sparsetir.schedules.gpu.spmm_groups import Groups
from sparsetir.schedules.gpu.spmm_hyb import HybRows
from sparsetir.schedules.gpu.spmm_panels import PanelThreads
from sparsetir.schedules.gpu.spmm_tensor_cores import TensorCores
from sparsetir.schedules.search.configs import from_data, to_data
from sparsetir.schedules.template import Choices
from sparsetir.schedules.templates.amx import AmxBlocks
from sparsetir.schedules.templates.block_attention import BlockTiles
from sparsetir.schedules.templates.block_linear import BlockTile
from sparsetir.schedules.templates.decomposed import Decomposed
from sparsetir.schedules.templates.edge_attention import AttentionTiles
from sparsetir.schedules.templates.edge_sums import SumLoops
from sparsetir.schedules.templates.message_tiles import Tile
from sparsetir.schedules.templates.registry import TEMPLATES
from sparsetir.schedules.templates.rgms import TiledRelations
from sparsetir.schedules.templates.rgms_backward import ChunkTiles
from sparsetir.schedules.templates.sddmm import SddmmGroups
from sparsetir.schedules.templates.spmm import RowBlocks
from sparsetir.schedules.templates.spmm_blocks import BlockRows
from sparsetir.schedules.templates.spmm_panels import PanelRows
from sparsetir.schedules.templates.spmm_sorted import SortedRows
from sparsetir.schedules.templates.spmv import SlicedRows

STORED = (
    BSR(4, 8), COO(), CSC(), CSF((1, 0)), CSR(), DBSR(2, 2), DCSR(), DIA(), ELL(),
    EnumeratedPatterns(4), Hyb(2, 3), Ragged(), RowELL(8), SELL(8, 64), SRBCRS(4, 16),
)  # fmt: skip
CONFIGS = (
    RowBlocks(tile=33, lanes=16, feat=33, pack=True, blocks=7),
    BlockRows(BSR(16, 8), 8, 32, blocks=3),
    PanelRows(5, 33, 16, 33, pack=True, blocks=3),
    PanelThreads(8, 2, True, True, 32, 2, panels=2, feat=70),
    SortedRows(16, 16, 33, window=512, blocks=3, ahead=7),
    SlicedRows(lanes=8, long=100, packed=False),
    SddmmGroups(16, 8, 3, 40, pack=True),
    RowSplit(row_cache=True, rows_per_block=1, occupancy=None),
    HybRows(c=2, k=3, work=4),
    TensorCores(SRBCRS(8, 32), tile=64, warps=(1, 2), vector=4),
    Groups("non-zeros", group=8, feat=64),
    FusedNonzeros(feat=32),
    *map(Decomposed, STORED),
    AmxBlocks(BSR(32, 16), 16, finite=True, blocks=4, parallel=False),
    Decomposed(BSR(8, 8), 20, 16, 20, filled=True),
    TiledRelations(48, 32, rows=6, depth=16, ranges=3),
    RelationalRows(3, 16, 32, shape=(1, 4), feat=64),
    RelationalTensorCores(0, 32, 64, vectors=(8, 4), shares=(1, 4)),
    Tile(8, parallel=True, blocks=3),
    AttentionTiles(Tile(8), Tile(4, gpu=True)),
    SumLoops(3),
    BlockTiles(8, 2, 3, parallel=False),
    WarpTiles(2, 3),
    BlockTile(4, 8),
    ChunkTiles(8, 3, blocks=2),
    GradientTiles(3, 64, (32, 32), vectors=(8, 2), shape=None, shares=(1, 2), feat=64),
    Choices({"sddmm.lanes": 8}),
)


def test_every_template_and_format_is_here():
    ours = {kind for kind, _ in TEMPLATES if kind.__module__.startswith("sparsetir.")}
    assert set(map(type, CONFIGS)) == ours
    assert {type(f) for f in STORED} == {
        e.kind for e in REGISTRY.values() if e.kind.__module__.startswith("sparsetir.")
    }


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_there_and_back_through_json(config):
    back = from_data(json.loads(json.dumps(to_data(config))))
    assert back == config and type(back) is type(config) and hash(back) == hash(config)


def test_what_the_data_look_like():
    assert to_data(Decomposed(Hyb(1, 3))) == {
        "template": "Decomposed", "format": {"format": "Hyb", "c": 1, "k": 3},
        "tile": None, "lanes": 1, "feat": None, "filled": False,
    }  # fmt: skip


def test_absent_fields_have_their_defaults():
    assert from_data({"template": "RowBlocks", "tile": 64}) == RowBlocks(tile=64)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"template": "Nope"}, "unknown template 'Nope'"),
        ({"template": ["RowBlocks"]}, "unknown template"),
        ({"tile": 3}, "'template' is missing"),
        ([1], "expected a dict"),
        ({"template": "RowBlocks", "colour": 1}, "unknown field 'colour' of RowBlocks"),
        ({"template": "RowBlocks", "tile": 0}, "argument 'tile'"),
        ({"template": "SlicedRows", "lanes": "8"}, "SlicedRows"),
        ({"template": "RowBlocks", "tile": {"a": 1}}, "'format' is missing"),
        ({"template": "RowBlocks", "tile": b"x"}, "RowBlocks.tile: expected a value that JSON"),
        ({"template": "Decomposed"}, "field 'format' of Decomposed is missing"),
        ({"template": "Decomposed", "format": {"format": "BSR", "rows": 2}}, "'cols' of BSR"),
        ({"template": "Decomposed", "format": {"format": "Mixture"}}, "unknown format 'Mixture'"),
        ({"template": "Decomposed", "format": "csr"}, "expected a format, got 'csr'"),
    ],
)
def test_wrong_data_are_refused_by_name(data, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        from_data(data)


def test_formats_that_are_no_data_are_refused_by_name():
    mixed = Mixture("band", (DIA(), CSR()), by_band(-1, 1))
    with pytest.raises(ValueError, match="expected a format of .*, got Mixture"):
        to_data(Decomposed(mixed))
    with pytest.raises(ValueError, match="format of matrices, got 'relational_hyb_3' of 3 axes"):
        Decomposed(RelationalHyb(3))
    with pytest.raises(ValueError, match="expected a template of .*, got int"):
        to_data(3)
