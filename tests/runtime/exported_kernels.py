"""Kernels to export: of each template for CPUs, and with each recipe."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from programs import PROGRAMS
from sparsetir.formats import BSR, Hyb
from sparsetir.schedules.operators.block_attention import BlockAttention
from sparsetir.schedules.operators.block_attention_backward import BlockAttentionBackward
from sparsetir.schedules.operators.block_linear import BlockLinear
from sparsetir.schedules.operators.edge_attention import EdgeAttention
from sparsetir.schedules.operators.edge_sums import EdgeSums
from sparsetir.schedules.operators.messages import Messages
from sparsetir.schedules.operators.problems import CsrPattern, Sddmm, Spmm
from sparsetir.schedules.operators.relations import RelationPattern
from sparsetir.schedules.operators.rgms import Rgms, RgmsGradient
from sparsetir.schedules.template import Choices
from sparsetir.schedules.templates.block_attention import BlockTiles
from sparsetir.schedules.templates.block_linear import BlockTile
from sparsetir.schedules.templates.decomposed import Decomposed
from sparsetir.schedules.templates.registry import TEMPLATES
from sparsetir.schedules.templates.rgms import TiledRelations
from sparsetir.schedules.templates.rgms_backward import ChunkTiles
from sparsetir.schedules.templates.row_tile import RowTile
from sparsetir.schedules.templates.spmm_blocks import BlockRows
from sparsetir.schedules.templates.spmv import SlicedRows

__all__ = ["CASES", "Case"]

RNG = np.random.default_rng(0)
FEAT, HEADS = 8, 2


class Case(NamedTuple):
    """A kernel to be built, and what to call it with.

    func, apply, config : as `sparsetir.build` takes them
    given : arguments by name, at least the index arrays and what no shape implies; arrays of
        floating-point numbers that are not here are random
    """

    func: Any
    apply: Any
    config: Any
    given: dict[str, Any]

    def arguments(self, kernel: Any) -> dict[str, Any]:
        """All that the kernel takes, what it writes full of NaN."""
        signature = kernel.signature
        values = [self.given.get(name) for name in signature.names]
        out: dict[str, Any] = {}
        for n, (name, value) in enumerate(zip(signature.names, values, strict=True)):
            if value is None and n in signature.arrays:
                shape, dtype = signature.expected_shape(n, values), signature.dtypes[n]
                value = RNG.uniform(-1, 1, shape).astype(dtype)
            if n in signature.outputs:
                value = np.full(signature.expected_shape(n, values), np.nan, signature.dtypes[n])
            out[name] = value
        return out


# -- matrices -------------------------------------------------------------------------------------

M, N = 20, 16
MASK = RNG.random((M, N)) < 0.3
MASK[3], MASK[5] = False, True
MATRIX = sp.csr_array(MASK.astype("float32"))
PATTERN = CsrPattern(MATRIX.indptr.astype("int32"), MATRIX.indices.astype("int32"), MATRIX.shape)
ORDER = np.arange(PATTERN.nnz, dtype="int32")
CSR: dict[str, Any] = {
    "indptr": PATTERN.indptr, "indices": PATTERN.indices, "m": M, "n": N, "nnz": PATTERN.nnz,
    "feat": FEAT, "width": FEAT, "heads": HEADS, "batch": 1, "scale": 0.5, "order": ORDER,
    "arg_out": np.zeros((M, HEADS, FEAT), "int32"), "scores": np.zeros(HEADS * PATTERN.nnz, "f4"),
}  # fmt: skip
ENDS: dict[str, Any] = {
    "source": PATTERN.indices, "m": M, "n": N, "nnz": PATTERN.nnz, "feat": FEAT,
    "target": np.repeat(np.arange(M, dtype="int32"), np.diff(PATTERN.indptr)),
}  # fmt: skip
BLOCKED: dict[str, Any] = {
    "indptr": PATTERN.indptr, "indices": PATTERN.indices, "m": M, "n": N, "blocks": PATTERN.nnz,
    "tokens": 4,
}  # fmt: skip
# (relation, row, column) triples, and CSF of them.
TRIPLES = (RNG.random((3, M, N)) < 0.2).nonzero()
RELATIONS = RelationPattern.of(*TRIPLES, (3, M, N), "int32")
BY_RELATION: dict[str, Any] = {
    **RELATIONS.arguments(), "relations": 3, "m": M, "n": N, "blocks": 1, "feat_in": 8, "feat": 8,
}  # fmt: skip
MASKED: dict[str, Any] = {
    "indptr": np.array([0, 2, 2, 3], "int32"), "indices": np.array([0, 2, 1], "int32"),
    "kind": np.array([0, 1, 0], "int32"), "bits": RNG.integers(1, 2**15, (2, 16, 1), "int16"),
    "heads": HEADS, "rows": 3, "cols": 3, "blocks": 3, "kinds": 2, "scale": 0.5,
}  # fmt: skip


# -- templates ------------------------------------------------------------------------------------


def registered(problem: Any, config: Any, pattern: Any = PATTERN, feat: int = FEAT) -> Case:
    """A kernel of a template of operators on patterns."""
    template = TEMPLATES[type(config), type(problem)]
    arranged = template.arrange(pattern, problem, config)
    sizes = {"heads": 1, "feat": feat, "feat_in": FEAT, "tiles": config.tiles(feat)}
    args = {**sizes, **arranged.arguments}
    if not isinstance(problem, Sddmm):
        nnz = len(pattern.indices)
        args |= arranged.stored.values(A=RNG.uniform(-1, 1, nnz).astype("float32"))
    return Case(template.program(problem, config), template.apply, config, args)


def of(problem: Any, config: Any, args: dict[str, Any]) -> Case:
    """A kernel of a template of other operators."""
    template = TEMPLATES[type(config), type(problem)]
    return Case(template.program(problem, config), template.apply, config, args)


MASK_TILES = BlockTiles(8, 2, 3)
TEMPLATE_CASES: dict[str, Callable[[], Case]] = {
    "RowTile": lambda: registered(Spmm(reduce="mean"), RowTile(8, 8, pack=True, blocks=3)),
    "RowBlocks_max": lambda: registered(Spmm(reduce="max"), RowTile(8, 8, parts=2)),
    "RowBlocks_min": lambda: registered(Spmm(reduce="min"), RowTile(8, 8)),
    "BlockRows": lambda: registered(Spmm(), BlockRows(BSR(4, 4), 4, 8, 8, filled=False, blocks=3)),
    "PanelRows": lambda: registered(Spmm(), RowTile(8, 8, 8, rows=4, blocks=3)),
    "SortedRows": lambda: registered(Spmm(), RowTile(8, 8, 8, window=7, blocks=3, ahead=9)),
    "SlicedRows": lambda: registered(Spmm(), SlicedRows(lanes=4, long=8), feat=1),
    "Choices": lambda: registered(Sddmm(), Choices({"sddmm.parts": 2, "sddmm.size": FEAT})),
    "Choices_none": lambda: registered(Sddmm(), Choices()),
    "Decomposed": lambda: registered(Spmm(), Decomposed(Hyb(2, 2))),
    "TiledRelations": lambda: registered(
        Rgms(), TiledRelations.for_sizes(FEAT, FEAT, 8), RELATIONS
    ),
    "messages": lambda: of(Messages("mul", "mean", "hf", "h"), Choices({"gspmm.size": FEAT}), CSR),
    "edge_attention": lambda: of(EdgeAttention(), Choices({"threads": 1}), CSR),
    "edge_sums": lambda: of(EdgeSums(idtype="int32"), Choices({"zero.size": FEAT}), ENDS),
    "block_attention": lambda: of(BlockAttention(16, 4, 6), MASK_TILES, MASKED),
    "block_attention_backward": lambda: of(BlockAttentionBackward(16, 4, 6), MASK_TILES, MASKED),
    "block_linear": lambda: of(BlockLinear(4, 4), BlockTile(4, 4), BLOCKED),
    "rgms_backward": lambda: of(
        RgmsGradient(in_blocks=True), ChunkTiles(8, 8, 3, 8, 1, 2), BY_RELATION
    ),
}  # fmt: skip


# -- primitives -----------------------------------------------------------------------------------


def plain(apply: Callable[..., Any], name: str = "spmm") -> Case:
    """A test program scheduled by a primitive: `apply(sch, it, loops)`; `loops` has I, J, K."""

    def scheduled(sch: Any) -> None:
        it = sch.get_sparse_iteration(name)
        loops = {h.name: h for h in sch.get_sp_iters(it)}
        apply(sch, it, SimpleNamespace(**loops))

    program = PROGRAMS[name]
    args = program.inputs(RNG, "small", "float32", "int32")
    return Case(program.make("float32", "int32"), scheduled, None, args)


def _pieces(sch: Any, it: Any, x: Any) -> None:
    chunks, *_ = sch.divide(sch.sparse_fuse(it, [x.I, x.J]), 3, by="work")
    sch.parallelize(chunks, race="temporary")


# Of those whose recipes no template takes.
PRIMITIVE_CASES: dict[str, Callable[[], Case]] = {
    "equal_parts": partial(plain, lambda s, it, x: s.divide(x.J, 3)),
    "split": partial(plain, lambda s, it, x: s.split(x.J, [None, 2, 3])),
    "split_coordinates": partial(
        plain, lambda s, it, x: (s.coord(x.J), s.split(x.J, [None, 8]))
    ),
    "pieces": partial(plain, _pieces),
    "patterns_by_count": partial(
        plain, lambda s, it, x: s.group_columns_by_pattern(x.I, x.J, 2, by="count")
    ),
    "tiles_of_rows": partial(plain, lambda s, it, x: (s.pos(x.I), s.split(x.I, [None, 3]))),
    "steps": partial(plain, lambda s, it, x: s.strip_mine_rows(x.J, 4)),
}  # fmt: skip

CASES: dict[str, Callable[[], Case]] = {**TEMPLATE_CASES, **PRIMITIVE_CASES}
