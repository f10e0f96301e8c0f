"""Runs the kernels of relational gather-matmul-scatter on torch tensors, without gradients.

Kernels take float32 and float64: of types with 16 bits, operands become float32 beforehand, and
results are rounded once. Elements are the edges in the order of the rows of relations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsetir.compiled import compiled
from sparsetir.lower import lower, lower_template
from sparsetir.ops.relations import CHUNK, RelationRows, Relations
from sparsetir.ops.structure import DTYPES, target_of
from sparsetir.request import default_threads
from sparsetir.schedules.default import vector_bits
from sparsetir.schedules.operators import rgms
from sparsetir.schedules.templates import rgms_backward
from sparsetir.schedules.templates.rgms_backward import ChunkTiles, RgmsBackward
from sparsetir.schedules.versions import WORK_OF_THREADS

__all__ = ["of_edges", "of_nodes", "of_weights"]

BLOCKS_PER_THREAD = 4
IDTYPES = {torch.int32: "int32", torch.int64: "int64"}


def of_nodes(
    relations: Relations, x: Tensor, weight: Tensor, values: Tensor | None, transposed: bool
) -> Tensor:
    """(m, feat) sums over edges of their value times x[source] @ weight[relation].

    x : (n, feat_in)
    weight : (relations, feat_in, feat)
    values : (E,) of the elements; by default ones
    transposed : of the edges in the other direction: x is (m, feat_in), the result (n, feat)
    """
    rows = relations.rows(transposed)
    m, n = (relations.n, relations.m) if transposed else (relations.m, relations.n)
    (count, feat_in, feat), dtype = weight.shape, x.dtype
    if not m * feat * feat_in * relations.edges:
        return x.new_zeros(m, feat)
    x, weight = _wide(x), _wide(weight)
    out = x.new_empty(m, feat)
    problem = rgms.Rgms(DTYPES[x.dtype], IDTYPES[rows.rows.dtype], values is not None)
    target = target_of(x.device)
    arrays = {
        "x": x, "w": weight, "out": out, "row_ptr": rows.row_ptr, "rows": rows.rows,
        "indptr": rows.indptr, "indices": rows.indices,
    }  # fmt: skip
    sizes = {
        "relations": count, "m": m, "n": n, "nnz_rows": len(rows.rows), "nnz": relations.edges,
        "feat_in": feat_in, "feat": feat,
    }  # fmt: skip
    _run(problem, None, target, lambda: lower(rgms.program(problem), target=target),
         _weighted(arrays, values), sizes)  # fmt: skip
    return out.to(dtype)


def of_weights(relations: Relations, x: Tensor, grad: Tensor, values: Tensor | None) -> Tensor:
    """(relations, feat_in, feat) sums over edges of their value times x[source]^T @ grad[target].

    x, grad : (n, feat_in) and (m, feat)
    values : (E,) of the elements; by default ones
    """
    feat_in, feat, dtype = x.shape[1], grad.shape[1], x.dtype
    rows = relations.by_target
    x, grad = _padded(x), _padded(grad)
    found = x.new_zeros(relations.count, x.shape[1], grad.shape[1])
    if found.numel() and relations.edges:
        chunks = rows.chunks
        parts = x.new_empty(len(chunks.relation), *found.shape[1:])
        _run_chunks(
            relations, False, values is not None, {**_weighted({}, values), "x": x, "grad": grad},
            dw=parts,
        )  # fmt: skip
        alone = len(parts) == relations.count and not (chunks.relation.diff() != 1).any()
        found = parts if alone else found.index_add_(0, chunks.relation, parts)
    return found[:, :feat_in, :feat].to(dtype).contiguous()


def of_edges(relations: Relations, x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
    """(E,) x[source] @ weight[relation] . grad[target] of each element, in the type of sums."""
    x, grad = _padded(x), _padded(grad)
    out = x.new_zeros(relations.edges)
    if x.shape[1] and grad.shape[1] and relations.edges:
        turned = _padded(weight.transpose(1, 2), grad.shape[1])
        _run_chunks(
            relations, True, False, {"x": x, "w": turned, "grad": grad}, da=out,
            relation=relations.by_target.chunks.relation,
        )  # fmt: skip
    return out


def _run_chunks(
    relations: Relations, edges: bool, weighted: bool, given: dict[str, Tensor], **more: Tensor
) -> None:
    rows, chunks = relations.by_target, relations.by_target.chunks
    x, grad = given["x"], given["grad"]
    problem = RgmsBackward(
        x.shape[1], grad.shape[1], CHUNK, edges, DTYPES[x.dtype], IDTYPES[rows.rows.dtype], weighted
    )
    work = len(rows.rows) * x.shape[1] * grad.shape[1]
    threads = default_threads()
    blocks = threads * BLOCKS_PER_THREAD if threads > 1 and work >= WORK_OF_THREADS else 0
    target = target_of(x.device)
    lanes = _lanes(x.dtype, target)
    while x.shape[1] % lanes or grad.shape[1] % lanes:
        lanes //= 2
    config = ChunkTiles(lanes, blocks=blocks)
    arrays = {
        **given, **more, "piece_ptr": chunks.piece_ptr, "chunk_ptr": chunks.chunk_ptr,
        "rows": rows.rows, "indptr": rows.indptr, "indices": rows.indices,
    }  # fmt: skip
    sizes = {
        "pieces": len(chunks.relation), "chunks": len(chunks.chunk_ptr) - 1,
        "nnz_rows": len(rows.rows), "nnz": relations.edges, "m": relations.m, "n": relations.n,
        "relations": relations.count,
    }  # fmt: skip
    _run(problem, config, target,
         lambda: lower_template(rgms_backward, problem, config, target), arrays, sizes)  # fmt: skip


def _run(
    problem: Any, config: Any, target: Any, stages: Callable[[], Any], arrays: dict[str, Tensor],
    sizes: dict[str, int],
) -> None:  # fmt: skip
    """Compile a kernel if it is new, and run it."""
    kernel = compiled((problem, config), target, stages)
    given = {**arrays, **sizes}
    kernel(**{name: given[name] for name in kernel.signature.names})


def _weighted(arrays: dict[str, Tensor], values: Tensor | None) -> dict[str, Tensor]:
    return arrays if values is None else {**arrays, "a": _wide(values)}


def _wide(x: Tensor) -> Tensor:
    """As kernels take it: contiguous, in the type of the sums."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.detach().resolve_neg().to(wide).contiguous()


def _lanes(dtype: torch.dtype, target: Any) -> int:
    """Numbers in a vector."""
    return vector_bits(target) // (64 if dtype == torch.float64 else 32)


def _padded(x: Tensor, rows: int | None = None) -> Tensor:
    """With zeros for features up to whole vectors, or a power of two of them where these are few.

    rows : as many, with zeros too
    """
    x = _wide(x)
    lanes, feat = _lanes(x.dtype, target_of(x.device)), x.shape[-1]
    size = -(-feat // lanes) * lanes if feat > lanes else 1 << max(feat - 1, 0).bit_length()
    below = 0 if rows is None else rows - x.shape[-2]
    return pad(x, (0, size - feat, 0, below)) if size != feat or below else x
