"""Errors of templates: problems, programs, targets, feature sizes and patterns."""

import importlib
from dataclasses import replace

import numpy as np
import scipy.sparse as sp

import sparsetir
from programs import PROGRAMS
from refusals import refusals
from schedule_common import BLOCKS
from small import text_of
from sparsetir import formats
from sparsetir.runtime.pipeline import lower, lower_template
from sparsetir.schedules.operators.problems import CsrPattern
from sparsetir.schedules.operators.relations import RelationPattern
from sparsetir.schedules.templates.registry import TEMPLATES
from spmm_gpu_common import GPU

MODULES = """
matrix_tiles=templates.matrix_tiles decomposed=templates.decomposed
block_attention=operators.block_attention
block_attention_cpu=templates.block_attention edge_attention=operators.edge_attention
rgms=operators.rgms rgms_backward=templates.rgms_backward rgms_cpu=templates.rgms rgms_gpu=gpu.rgms
rgms_gradients_gpu=gpu.rgms_gradients
sddmm=operators.sddmm sddmm_gpu=gpu.sddmm
spmm=operators.spmm spmm_blocks=templates.spmm_blocks spmm_groups=gpu.spmm_groups
spmm_hyb=gpu.spmm_hyb spmm_tensor_cores=gpu.spmm_tensor_cores spmv=operators.spmv
spmm_cpu=templates.row_tile spmv_cpu=templates.spmv
"""
NAMES = {
    **vars(formats), **{kind.__name__: kind for pair in TEMPLATES for kind in pair},
    **{n: importlib.import_module(f"sparsetir.schedules.{folder}")
       for n, folder in (pair.split("=") for pair in MODULES.split())},
    "lower": lower, "RelationPattern": RelationPattern, "replace": replace, "GPU": GPU,
}  # fmt: skip
TARGET = {"kind": "llvm", "mtriple": "x86_64-unknown-linux-gnu", "mcpu": "sapphirerapids"}
FULL, EYE = np.ones((8, 8), "float32"), np.eye(16, dtype="float32")
NOTHING = CsrPattern(np.zeros(1, "int32"), np.zeros(0, "int32"), (0, 0))
MANY_ROWS = CsrPattern(np.zeros(2**20 + 1, "int32"), np.zeros(0, "int32"), (2**20, 8))
IDS = [np.random.default_rng(4).integers(0, size, 100) for size in (3, 20, 10)]
SUMS = "Y[r * 4 + p, f] = Y[r * 4 + p, f] +"
STEPS = text_of("other", """
Y = T.alloc_sparse_buffer((K,), "float32", "local")
with T.sp_iter([I], "S", "rows") as [i]:
    with T.sp_iter([L], "S", "inner") as [l]:
        X[i, l] = X[i, l] + X[i, l]
    with T.sp_iter([K], "S", "next") as [k]:
        Y[k] = X[i, k]
    with T.sp_iter([K], "S", "last") as [k]:
        X[i, k] = Y[k]
""", "K = T.dense_fixed(16)\nL = T.dense_fixed(16)", X="I K")  # fmt: skip


def given(problem, config, target=GPU):
    """Lower the template that a config is of."""
    return lower_template(TEMPLATES[type(config), type(problem)], problem, config, target)


def on(program, template, config):
    """Schedule a program by a template."""
    program = sparsetir.from_source(program) if isinstance(program, str) else program
    template.apply(sparsetir.Schedule(program), config)


def planned(matrix, config, feat=64, op="spmm", **options):
    matrix = sp.csr_array(matrix) if isinstance(matrix, np.ndarray) else matrix
    sparsetir.plan(op, matrix, feat, config=config, **options)


def changed(old, new):
    """The blocks, with another text in a place."""
    assert old in BLOCKS
    return BLOCKS.replace(old, new)


def two_reductions():
    """A sum with a maximum in one of its parts."""
    text = NAMES["spmm_hyb"].program(NAMES["Spmm"](), NAMES["HybRows"](k=1)).script()
    head, _, term = text.rpartition("C[ib, k] = C[ib, k] + ")
    return f"{head}C[ib, k] = T.max(C[ib, k], {term.rstrip()})\n"


def usual(name):
    return PROGRAMS[name].make("float32", "int32")


# -- feature sizes
test_refused_features = refusals(
    """
RowTile(tile=32).tiles(48)  # ScheduleError: serves multiples of 32 features, got 48
planned(FULL, RowTile(tile=32), 48)  # ScheduleError: serves multiples of 32 features, got 48
planned(FULL, RowTile(tile=32, feat=64), 48)  # ScheduleError: serves 64 features, got 48
RowTile(64, rows=4).tiles(100)  # ScheduleError: RowTile.tiles: argument 'feat': .. multiples of 64
SlicedRows().tiles(20)  # ScheduleError: argument 'feat': the config serves 1 feature, got 20
planned(FULL, Choices({"gspmm.size": 64}), op="sddmm")
    # ScheduleError: 'gspmm.size': expected choices of sddmm, threads or registers
planned(FULL, Choices({"sddmm.parts": 1, "sddmm.size": 32}), 48, op="sddmm")
    # ScheduleError: plan: argument 'config': 'sddmm.size': serves 32 features, got 48
FusedNonzeros(8, 16, 2, 4, 1).tiles(40)  # ScheduleError: serves multiples of 32 features, got 40
TiledRelations.for_sizes(32, 32).tiles(64)
    # ScheduleError: the config serves 32 features, got 64
replace(MatrixTiles(BSR(32, 32)), given=True).tiles(32)
    # ScheduleError: 'given': plans take B as it is, got a config for B
RowSplit().tiles(96)  # ScheduleError: serves multiples of 128 features, got 96
RowSplit(feat=64).tiles(128)  # ScheduleError: serves 64 features, got 128
Groups().tiles(40)  # ScheduleError: serves multiples of 32 features, got 40
RelationalRows().tiles(30)  # ScheduleError: RelationalRows.tiles: .. features, got 30
RelationalRows(feat=64).tiles(32)  # ScheduleError: RelationalRows.tiles: .. features, got 32
GradientTiles().tiles(30)  # ScheduleError: GradientTiles.tiles: .. features, got 30
GradientTiles(feat=64).tiles(32)  # ScheduleError: GradientTiles.tiles: .. features, got 32
""",
    {**globals(), **NAMES},
)
# -- problems
test_refused_problems = refusals(
    """
spmv.program(Spmm(reduce="mean"), SlicedRows())
    # ScheduleError: spmv: argument 'config': SlicedRows serves sums of
spmv.program(Spmm(reduce="max"), SlicedRows())  # ScheduleError: SlicedRows serves sums of
spmv.program(Spmm(batched=True), SlicedRows())  # ScheduleError: SlicedRows serves sums of
planned(FULL, Decomposed(CSR()), heads=2)  # ScheduleError: got heads
planned(FULL, Decomposed(CSR()), reduce="max")  # ScheduleError: got reduce='max'
planned(FULL, Decomposed(CSR()), reduce="mean")  # ScheduleError: got reduce='mean'
planned(FULL, Decomposed(CSR()), op="sddmm")
    # TypeError: expected Choices for this operator
planned(FULL, BlockRows(BSR(8, 8)), reduce="mean")
    # ScheduleError: serves sums of one matrix, got reduce='mean'
matrix_tiles.program(Spmm("float32"), MatrixTiles(BSR(32, 32)))
    # ScheduleError: matrix_tiles.program: argument 'config': MatrixTiles serves sums of one matrix
    in bfloat16 or float16, got dtype 'float32'
matrix_tiles.program(Spmm("bfloat16", batched=True), MatrixTiles(BSR(32, 32)))
    # ScheduleError: got heads
matrix_tiles.program(Spmm("bfloat16", reduce="mean"), MatrixTiles(BSR(32, 32)))
    # ScheduleError: got reduce='mean'
matrix_tiles.arrange(NOTHING, Spmm("float32"), MatrixTiles(BSR(32, 32)))
    # ScheduleError: matrix_tiles.arrange: argument 'config': .. got dtype 'float32'
given(Spmm(), RowSplit(vector=8))  # ScheduleError: vectors of at most 4 float32, got 8
given(Spmm(), HybRows(vector=8))  # ScheduleError: vectors of at most 4 float32, got 8
given(Spmm(), Groups(vector=8))  # ScheduleError: vectors of at most 4 float32, got 8
lower(sddmm.program(Sddmm("float64")), sddmm_gpu.apply, FusedNonzeros(), GPU)
    # ScheduleError: expected vectors of at most 2 float64, got 4
spmm_hyb.program(Spmm(batched=True), HybRows())
    # ScheduleError: 'problem': expected no batch, got one
given(Spmm("float16"), PanelThreads(atomics=True))  # ScheduleError: PanelThreads: argument
    'config': expected atomics=False and compact=False for float16
given(Spmm("float16"), PanelThreads(compact=True))
    # ScheduleError: expected atomics=False and compact=False for float16
spmm_tensor_cores.program(Spmm("float16", batched=True), TensorCores(BSR(32, 32)))
    # ScheduleError: serves sums of one matrix in bfloat16 or float16 or int8, got heads
spmm_tensor_cores.program(Spmm(), TensorCores(BSR(32, 32)))
    # ScheduleError: serves sums of one matrix in .. got dtype 'float32'
spmm_tensor_cores.arrange(NOTHING, Spmm("float16", reduce="max"), TensorCores(BSR(32, 32)))
    # ScheduleError: serves sums of one matrix in .. got reduce='max'
given(Spmm("float16"), TensorCores(BSR(128, 128), warps=(4, 2), stages=8, depth=128))
    # ScheduleError: stages of .. bytes each to fit in 166912 bytes of shared memory, got 8
rgms_gpu.program(Rgms("float16"), RelationalRows())
    # ScheduleError: 'problem': expected a result of float32 or float64
rgms_gpu.program(Rgms(), RelationalRows(depth=16, shape=None, shares=(1, 1)))
    # ScheduleError: with out='float32' on tensor cores, got dtype 'float32'
rgms_gpu.program(Rgms("float16"), RelationalRows(depth=16, shape=None, shares=(1, 1)))
    # ScheduleError: with out='float32' on tensor cores, got out=None
rgms_gradients_gpu.program(RgmsGradient(), GradientTiles(shape=None, shares=(1, 1)))
    # ScheduleError: 'problem': expected operands of float16 or bfloat16
""",
    {**globals(), **NAMES},
)
# -- programs and targets
test_refused_programs = refusals(
    """
on(usual("spmm"), spmv_cpu, SlicedRows())
    # ScheduleError: SlicedRows: argument 'sch': expected 'spmm' to
on(usual("elementwise"), spmv_cpu, SlicedRows())
    # ScheduleError: SlicedRows: argument 'sch': expected 'elementwise' to
on(usual("elementwise"), spmm_cpu, RowTile())
    # ScheduleError: RowTile: argument 'sch': expected 'elementwise' to be a reduction
on(spmm.program(Spmm()), spmm_blocks, BlockRows(BSR(8, 8)))
    # ScheduleError: BlockRows: .. 'spmm' to visit the rows of a block, of a constant number
on(changed(SUMS, f'T.sp_iter_attr({{"ordered": 1}}); {SUMS[:17]}'), spmm_blocks,
   BlockRows(BSR(4, 4), 4, 16, 8))
    # ScheduleError: BlockRows: argument 'sch': expected 'sums' to be a reduction
on(changed("Y[r * 4 + p, f]", "Y[f, r * 4 + p]"), spmm_blocks, BlockRows(BSR(4, 4), 4, 16, 8))
    # ScheduleError: BlockRows: argument 'sch': expected 'sums' to visit rows, what they
    store, and features
on(changed("SRSRS", "SSSSS"), spmm_blocks, BlockRows(BSR(4, 4), 4, 16, 8))
    # ScheduleError: BlockRows: argument 'sch': expected one iteration that sums, got []
on(decomposed.program(Spmm(), Decomposed(CSC())), spmm_blocks, BlockRows(BSR(4, 4), 4, 16, 8))
    # ScheduleError: BlockRows: .. expected 'spmm_csc' to visit rows, what they store, and features
given(Spmm(), BlockRows(BSR(4, 4), 4, 16, 8))  # ScheduleError: scheduled for no threads
given(Spmm("bfloat16"), MatrixTiles(BSR(32, 32)), {**TARGET, "mcpu": "x86-64-v4"})
    # ScheduleError: lower: 'spmm' is scheduled for a CPU with amx-tile and amx-bf16, which target
    .. x86-64 .. lacks; choose another schedule, or a target that has them
given(Spmm("float16"), MatrixTiles(BSR(32, 32)), TARGET)
    # ScheduleError: for a CPU with amx-fp16, which target .. sapphirerapids
lower(spmm.program(Spmm("bfloat16")), matrix_tiles.apply, MatrixTiles(BSR(32, 32)), TARGET)
    # ScheduleError: MatrixTiles: argument 'sch': expected 'spmm' to visit the rows of a block
on(spmm.program(Spmm()), rgms_cpu, TiledRelations.for_sizes(32, 32))
    # ShapeError: TiledRelations: argument 'sch'
lower(spmm.program(Spmm(), None), rgms_backward.apply, ChunkTiles(4, 4))
    # ShapeError: rgms_backward: .. 'spmm' to visit relations, their rows, what these store
on(edge_attention.program(EdgeAttention()), block_attention_cpu, BlockTiles())
    # ScheduleError: block_attention: argument 'sch': expected
on(STEPS, block_attention_cpu, BlockTiles(16, 1))
    # ScheduleError: 'inner' to visit 'K', at most one other
lower(sddmm.program(Sddmm()), sddmm_gpu.apply, FusedNonzeros(), "llvm")
    # ScheduleError: 'sddmm' is scheduled for the threads of a GPU, which
on(spmm.program(Spmm()), spmm_hyb, HybRows())  # ScheduleError: HybRows: argument 'sch': expected
    an iteration that sets the result, and others that add to it in 'spmm'
on(two_reductions(), spmm_hyb, HybRows())
    # ScheduleError: HybRows: argument 'sch': expected one operator, got ['max', 'sum'] in 'spmm'
lower(usual("mttkrp"), spmm_groups.apply, Groups(lanes=4, group=4), GPU)
    # ScheduleError: strip_mine_rows: expected a reduction over .. under a dense one
lower(usual("mttkrp"), spmm_groups.apply, Groups("non-zeros", work=4), GPU)
    # ScheduleError: Groups: .. expected one loop over what rows store
on(rgms_gpu.program(Rgms(), RelationalRows(0)), rgms_gpu,
   RelationalRows(0, shape=None, shares=(1, 1)))
    # ScheduleError: expected operands of one of float16, bfloat16, int8
on(rgms.program(Rgms()), rgms_gpu, RelationalRows())
    # ScheduleError: RelationalRows: .. an iteration that sets the result
on(rgms.gradient(RgmsGradient()), rgms_gradients_gpu, GradientTiles())
    # ScheduleError: GradientTiles: .. an iteration that sets the result
""",
    {**globals(), **NAMES},
)
# -- patterns
test_refused_patterns = refusals(
    """
planned(MANY_ROWS, RowTile(parts=2**11), 128)
    # ScheduleError: at most 2147483647 .. got 2048 .. 1048576
planned(EYE, BlockRows(BSR(8, 8)))  # ScheduleError: expected a pattern that fills bsr_8_8
planned(np.ones((12, 16), "float32"), BlockRows(BSR(8, 8)))
    # ScheduleError: blocks of (8, 8) divide, .. got (12, 16)
planned(EYE, Decomposed(BSR(2, 4), filled=True), 16)
    # ScheduleError: expected a pattern that fills bsr_2_4
RelationPattern.of(*IDS, (3, 5, 10))
    # ValueError: RelationPattern.of: argument 'row': expected 0 to 4, got
RelationPattern.of(*IDS[:2], IDS[2] * 0.5, (3, 20, 10))
    # ValueError: argument 'column': expected (100,) integers, got float
RelationPattern.of(*IDS, (3, 2**33, 10), "int32")
    # ValueError: argument 'idtype': expected a type that holds 8589934
""",
    {**globals(), **NAMES},
)
