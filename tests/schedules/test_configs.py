"""Configs: as JSON data, and back; what they and problems refuse."""

import json

import pytest

from schedule_common import says, table
from sparsetir import formats
from sparsetir.formats import CSR, DIA, ELL, Hyb, Mixture, RelationalHyb, by_band
from sparsetir.formats.format import REGISTRY
from sparsetir.schedules.gpu.rgms import RelationalRows
from sparsetir.schedules.search.configs import from_data, to_data
from sparsetir.schedules.templates.decomposed import Decomposed
from sparsetir.schedules.templates.registry import TEMPLATES
from sparsetir.schedules.templates.row_tile import RowTile

NAMES = {**vars(formats), **{t.__name__: t for pair in TEMPLATES for t in pair}}


def made(text):
    """The values of each line of a text."""
    return [eval(line, dict(NAMES)) for line in text.strip().splitlines()]


STORED = made("""
BSR(4, 8)
COO()
CSC()
CSF((1, 0))
CSR()
DBSR(2, 2)
DCSR()
DIA()
ELL()
EnumeratedPatterns(4)
Hyb(2, 3)
QuantisedRows(4)
Ragged()
RowELL(8)
SELL(8, 64)
SRBCRS(4, 16)
""")
CONFIGS = [*map(NAMES["Decomposed"], STORED), *made("""
RowTile(tile=33, lanes=16, feat=33, pack=True, blocks=7)
BlockRows(BSR(16, 8), 8, 32, blocks=3)
RowTile(33, 16, 33, rows=5, pack=True, blocks=3)
PanelThreads(8, 2, True, True, 32, 2, panels=2, feat=70)
RowTile(16, 16, 33, window=512, blocks=3, ahead=7, tiles_first=False)
SlicedRows(lanes=8, long=100, packed=False)
RowSplit(row_cache=True, rows_per_block=1, occupancy=None)
HybRows(c=2, k=3, work=4)
TensorCores(SRBCRS(8, 32), tile=64, warps=(1, 2), vector=4, feat=68)
Groups("non-zeros", group=8, feat=64)
FusedNonzeros(feat=32)
MatrixTiles(BSR(32, 16), 16, finite=True, blocks=4, parallel=False)
Decomposed(BSR(8, 8), filled=True)
TiledRelations(48, 32, rows=6, depth=16, ranges=3)
RelationalRows(3, 16, 32, shape=(1, 4), feat=64)
RelationalRows(0, 32, 64, vectors=(8, 4), shape=None, shares=(1, 4))
BlockTiles(8, 2, 3, parallel=False)
WarpTiles(2, 3)
WarpgroupTiles(3)
BlockTile(4, 8)
ChunkTiles(8, 3, blocks=2)
Assembled(False, True, parallel=False, levels=2)
ElementThreads(64)
TermLanes(4, 64)
RowTables()
GradientTiles(3, 64, (32, 32), vectors=(8, 2), shape=None, shares=(1, 2), feat=64)
Choices({"sddmm.lanes": 8})
""")]  # fmt: skip


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
        "filled": False,
    }  # fmt: skip


def test_absent_fields_have_their_defaults():
    assert from_data({"template": "RowTile", "tile": 64}) == RowTile(tile=64)
    # Of versions before.
    for name, config in (
        ("RowBlocks", RowTile(64, prefetch=8)),
        ("SortedRows", RowTile(64, window=4096, tiles_first=False)),
        ("PanelRows", RowTile(64, rows=4)),
        (
            "RelationalTensorCores",
            RelationalRows(depth=32, vectors=(8, 8), shape=None, shares=(2, 2)),
        ),
    ):
        assert from_data({"template": name, "tile": 64}) == config
    assert from_data({"template": "RowBlocks", "prefetch": 0}) == RowTile()
    tiled = {**to_data(Decomposed(ELL(), True)), "tile": 64, "lanes": 8, "feat": None}
    assert from_data(tiled) == Decomposed(ELL(), True)
    panels = RowTile(64, rows=6)
    assert from_data({**to_data(panels), "compact": True}) == panels


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"template": "Nope"}, "unknown template 'Nope'"),
        ({"template": ["RowTile"]}, "unknown template"),
        ({"tile": 3}, "'template' is missing"),
        ([1], "expected a dict"),
        ({"template": "RowTile", "colour": 1}, "unknown field 'colour' of RowTile"),
        ({"template": "RowTile", "tile": 0}, "argument 'tile'"),
        ({"template": "SlicedRows", "lanes": "8"}, "SlicedRows"),
        ({"template": "RowTile", "tile": {"a": 1}}, "'format' is missing"),
        ({"template": "RowTile", "tile": b"x"}, "RowTile.tile: expected a value that JSON"),
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


# Of configs of all templates and problems of operators, the words of what is refused.
REFUSED = """
RowTile(tile=0)  # 'tile': expected 1 to 256, got 0
RowTile(lanes=12)  # 'lanes': expected a power of two up to tile = 128
RowTile(tile=40, lanes=16)  # expected a multiple of lanes = 16 where 'feat' is not given, got 40
RowTile(feat=100)  # 'feat': expected at least tile = 128, got 100
RowTile(parts=0)  # 'parts': expected 1 or more, got 0
RowTile(feat=200, parts=2)
    'parts': expected 1 where tiles of 128 features overlap, as 200 is no multiple
BlockRows(CSR())  # 'format': expected BSR or DBSR, got CSR
BlockRows(BSR(8, 8), rows=3)  # 'rows': expected a divisor of the 8 rows of a block, got 3
BlockRows(BSR(8, 8), rows=0)  # 'rows'
BlockRows(DBSR(8, 8), blocks=2)  # 'blocks': expected 1 for DBSR
BlockRows(BSR(8, 8), tile=40)  # 'tile': expected a multiple of lanes = 16
RowTile(64, rows=0)  # 'rows': expected 1 to 6, got 0
RowTile(64, rows=7)  # 'rows': expected 1 to 6, got 7
RowTile(64, blocks=0, rows=4)  # 'blocks': expected 1 or more for copies, parts, rows by length
RowTile(64, blocks=0, pack=True)  # 'blocks': expected 1 or more for copies
RowTile(64, rows=4, prefetch=8)  # 'prefetch': expected 0 with panels of rows, got 8
RowTile(64, rows=4, window=8)  # 'window': expected 0 with panels of rows, got 8
RowTile(64, rows=4, tiles_first=False)  # 'tiles_first': expected True with panels of rows
RowTile(64, window=8, parts=2)  # 'parts': expected 1 where rows are sorted by length, got 2
RowTile(32, window=-1)  # 'window': expected 0 or more, got -1
RowTile(32, ahead=-1)  # 'ahead': expected 0 or more, got -1
RowTile(32, blocks=1.5)  # 'blocks': expected an integer
SlicedRows(lanes=12)  # 'lanes': expected a power of two, got 12
SlicedRows(long=8)  # 'long': expected 16 or more, got 8
SlicedRows(window=0)  # 'window': expected 1 or more, got 0
SlicedRows(blocks=0)  # 'blocks': expected 1 or more, got 0
SlicedRows(ahead=-1)  # 'ahead': expected 0 or more, got -1
SlicedRows(prefetch=-1)  # 'prefetch': expected 0 or more, got -1
MatrixTiles(CSR())  # 'format': expected BSR
MatrixTiles(BSR(32, 32), features=8)  # 'features': expected 16
MatrixTiles(BSR(32, 32), blocks=0)  # 'blocks': expected 1 or more
TiledRelations(32, 32, tile=24)  # 'tile': expected a divisor of
TiledRelations(24, 32, depth=24)  # 'lanes_in': expected a power of two that
TiledRelations(32, 32, ranges=0)  # 'ranges': expected None, or 1 or more
ChunkTiles(4, 4, lanes=3)  # 'lanes': expected a power of two
BlockTiles(lanes=3)  # 'lanes': expected a power of two
BlockTiles(tile=0)  # 'tile': expected 1 or more
RowSplit(threads=0)  # 'threads': expected 1 or more, got 0
RowSplit(occupancy=4096)  # 'occupancy': expected None, or 1 to 2048, got 4096
RowSplit(threads=512, rows_per_block=4)  # 'rows_per_block': expected .. at most 1024, got 2048
RowSplit(vector=3)  # 'vector': expected .. 1, 2, 4 or 8, got 3
RowSplit(coarsen=32)  # 'coarsen': expected .. at most 64, got 128
RowSplit(feat=30)  # 'feat': expected .. a multiple of vector = 4, got 30
RowSplit(row_cache=True)  # 'row_cache': expected .. rows_per_block = 1
HybRows(c=100)  # 'c': expected c * (k + 1) to be at most 120, got 600
HybRows(unroll=3)  # 'unroll': expected a power of two, got 3
HybRows(work=0)  # 'work': expected None, or a power of two, got 0
HybRows(vector=3)  # 'vector'
Groups(split="columns")  # 'split': expected one of rows, non-zeros, got 'columns'
Groups(work=0)  # 'work': expected 1 or more, got 0
Groups("non-zeros", rows="x")  # 'rows': expected one of table, search, blocks, got 'x'
Groups(lanes=6)  # 'lanes': expected a power of two, got 6
Groups(lanes=64, group=64)  # 'group': expected a power of two up to 32, got 64
Groups(block=2048)  # 'block': expected a multiple of 8 threads .. at most 1024, got 2048
Groups(coarsen=32)  # 'coarsen': expected .. at most 64, got 128
Groups(occupancy=4096)  # 'occupancy': expected None, or 1 to 2048, got 4096
Groups(vector=3)  # 'vector': expected 1, 2, 4 or 8, got 3
Groups(feat=30)  # 'feat': expected a multiple of vector = 4, got 30
Groups(lanes=4, group=8)  # 'group': expected at most lanes = 4, .. got 8
Groups("non-zeros", lanes=4)  # 'lanes': expected 1 for split = .. got 4
Groups("non-zeros", work=4, group=8)  # 'group': expected 1 for work = 4, .. got 8
Groups(rows="search")  # 'rows': expected "table" for split = 'rows', got 'search'
Groups(lanes=32, group=32, block=384)  # 'block': expected a multiple of 256 threads .. got 384
PanelThreads(rows=7)  # 'rows': expected 2 to 6, or with compact=True to 8, got 7
PanelThreads(rows=9, compact=True)  # 'rows': expected 2 to 8, got 9
PanelThreads(unroll=17)  # 'unroll': expected 1 to 16, got 17
PanelThreads(threads=8, panels=2, atomics=True)  # 'panels': expected 1 for threads = 8
PanelThreads(panels=64)  # expected threads * panels to be at most 1024, got 2048
PanelThreads(rows=6, coarsen=4, vector=4)  # rows * coarsen * vector to be at most 64, got 96
FusedNonzeros(threads=3)  # 'threads': expected a power of two up to 32, got 3
FusedNonzeros(threads=64)  # 'threads': expected a power of two up to 32, got 64
FusedNonzeros(groups=512)  # 'groups': expected at most 128, got 512
FusedNonzeros(work=0)  # 'work': expected 1 or more, got 0
FusedNonzeros(vector=3)  # 'vector': expected 1, 2, 4 or 8, got 3
FusedNonzeros(feat=30)  # 'feat': expected a multiple of vector = 4, got 30
TensorCores(ELL())  # 'format': expected BSR, DBSR or SRBCRS of multiples of 8
TensorCores(BSR(4, 8))  # 'format': expected BSR, DBSR or SRBCRS of multiples of 8
TensorCores(BSR(32, 32), vector=3)  # 'vector': expected 1, 2, 4, 8 or 16, got 3
TensorCores(BSR(32, 32), tile=36)  # 'tile': expected a multiple of vector = 8, got 36
TensorCores(BSR(32, 32), feat=36)  # 'feat': expected a multiple of vector = 8, got 36
TensorCores(BSR(32, 32), stages=9)  # 'stages': expected 1 to 8, got 9
TensorCores(BSR(32, 32), stages=0)  # 'stages': expected 1 to 8, got 0
TensorCores(BSR(32, 32), depth=24)
    'depth': expected None or a multiple of 8 that divides 32, got 24
TensorCores(BSR(32, 32), warps=(3, 1))
    'warps': expected a multiple of 16 of rows or features for each
TensorCores(BSR(32, 32), warps=(1, 32))  # 'warps': expected two, 16 together, got (1, 32)
TensorCores(BSR(32, 32), warps=4)  # 'warps': expected two, 16 together, got 4
RelationalRows(vectors=(3, 4))  # 'vectors': expected two of 1, 2, 4 and 8, got (3, 4)
RelationalRows(depth=24, shape=None, shares=(2, 2))
    'depth': expected a multiple of 16 on tensor cores, got 24
RelationalRows(shape=(3, 4))  # 'shape': expected two numbers that make 32 by 64 sums with
RelationalRows(shape=None, shares=(4, 1))
    'shares': expected two numbers, 16 together, that leave
RelationalRows(stages=5)  # 'stages': expected 1 to 4, got 5
RelationalRows(feat=30)  # 'feat': expected a multiple of vectors = (4, 4), got 30
RelationalRows(rows=0)  # 'rows': expected 1 or more, got 0
GradientTiles(vectors=(3, 4))  # 'vectors': expected two of 1, 2, 4 and 8, got (3, 4)
GradientTiles(depth=24, shape=None, shares=(1, 1))
    'depth': expected a multiple of 16 on tensor cores
GradientTiles(shape=(3, 4))
    'shape': expected two numbers that make 32 by 64 sums with a multiple of 32
GradientTiles(shape=None, shares=(4, 1))
    'shares': expected two numbers, 16 together, that leave each
GradientTiles(stages=5)  # 'stages': expected 1 to 4, got 5
GradientTiles(tile=(0, 16))  # 'tile': expected two numbers of at least 1, got (0, 16)
GradientTiles(feat=30)  # 'feat': expected a multiple of vectors = (4, 4), got 30
GradientTiles(rows=0)  # 'rows': expected 1 or more, got 0
Spmm("float16", out="float64")  # 'out': expected None, 'float16' or 'flo
Spmm("int8")  # 'dtype'
Rgms("int8")  # 'dtype'
Rgms("float16", out="float64")  # 'out': expected None, 'float16' or
Rgms("float16", added=True)  # 'added': expected False where the result is not float32
Rgms("float32", values="float16")  # 'values': expected None, 'float32' or
RgmsGradient(edges=True)  # 'weighted': expected False with
RgmsGradient("int8")  # 'dtype': expected one of float32
RgmsGradient(values="float16")  # 'values': expected None, 'float32' or
BlockAttention(block=24)  # 'block': expected a multiple of 16, got 24
BlockAttention(feat=0)  # 'feat': expected 1 or more, got 0
BlockAttention(dtype="int8")  # 'dtype'
Messages("pow")  # 'op'
Messages(reduce="prod")  # 'reduce'
Messages(u="x")  # 'u'
Messages(arg=True)  # 'arg'
Messages("mul", "max", dtype="bfloat16", ordered=True, arg=True)  # 'dtype'
EdgeMessages(lhs_at="v")  # 'lhs_at'
EdgeSoftmax("float16")  # 'dtype'
"""
BASES = {"HybRows", "BlockRows"}  # which have fields of others


@pytest.mark.parametrize(("_", "code", "words"), table(REFUSED))
def test_refused(_, code, words):
    text, kind = says(code, words, NAMES), code.partition("(")[0]
    assert kind in BASES or text.startswith(f"{kind}: argument '"), text
