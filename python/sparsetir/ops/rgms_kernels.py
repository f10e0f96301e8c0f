"""Runs the kernels of relational gather-matmul-scatter on torch tensors, without gradients.

Kernels of sums at nodes take types of 16 bits as they are: CPUs in float32, GPUs on tensor cores
where there are any, which round sums of what a row gathers. For gradients of weights operands
become float32 beforehand. Results are rounded once. Elements are the edges in the order of the rows
of relations.

On GPUs sums at nodes, which gradients of features are too, have kernels. Gradients for weights of
relations and of edges have none there: torch computes each relation apart, with features for each
of its edges, as it computes all on other devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsetir.arrays import is_array
from sparsetir.compiled import compiled
from sparsetir.lower import lower_template
from sparsetir.ops.relations import CHUNK, RelationRows, Relations
from sparsetir.ops.structure import DTYPES, call_plan, target_of
from sparsetir.relational_plan import relational_plan
from sparsetir.relational_request import RelationalRequest
from sparsetir.request import default_threads
from sparsetir.schedules.default import is_gpu, vector_bits
from sparsetir.schedules.operators import rgms
from sparsetir.schedules.search.choose_rgms import lanes_of, whole_vectors
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
    target = target_of(x.device)
    if not (_has_kernels(x) or is_gpu(target)):
        out, wide = _wide(x).new_zeros(m, feat), _wide(weight)
        for r, row, terms in _apart(rows, _wide(x), values):
            out.index_add_(0, row, terms @ wide[r])
        return out.to(dtype)
    problem = _problem(dtype, IDTYPES[rows.rows.dtype], values is not None)
    key = problem, feat_in, feat
    run = rows.computed.get(key)
    if run is None:
        pattern, threads = rows.pattern((count, m, n)), default_threads()
        wanted = RelationalRequest(pattern, problem, feat_in, feat, threads, target)
        run = rows.computed[key] = relational_plan(wanted)
    given = x.detach(), weight.detach()
    return call_plan(run, given, None if values is None else _wide(values)).to(dtype)


def _problem(dtype: torch.dtype, idtype: str, weighted: bool) -> rgms.Rgms:
    """What kernels are compiled for: they take types of 16 bits, and give wider ones."""
    wide = DTYPES[_widened(dtype)]
    if DTYPES[dtype] == wide:
        return rgms.Rgms(wide, idtype, weighted)
    return rgms.Rgms(DTYPES[dtype], idtype, weighted, out=wide, values=wide if weighted else None)


def of_weights(relations: Relations, x: Tensor, grad: Tensor, values: Tensor | None) -> Tensor:
    """(relations, feat_in, feat) sums over edges of their value times x[source]^T @ grad[target].

    x, grad : (n, feat_in) and (m, feat)
    values : (E,) of the elements; by default ones
    """
    feat_in, feat, dtype = x.shape[1], grad.shape[1], x.dtype
    found = x.new_zeros(relations.count, feat_in, feat)
    if not found.numel() or not relations.edges:
        return found
    if not _has_kernels(x):
        wide = _wide(grad)
        for r, row, terms in _apart(relations.by_target, _wide(x), values):
            found[r] = (terms.T @ wide[row]).to(dtype)
        return found
    x, grad, chunks = _padded(x), _padded(grad), relations.by_target.chunks
    parts = x.new_empty(len(chunks.relation), x.shape[1], grad.shape[1])
    arrays = _weighted({"x": x, "grad": grad, "dw": parts}, values)
    _run_chunks(relations, False, arrays)
    if not chunks.one_each:
        sums = parts.new_zeros(relations.count, *parts.shape[1:])
        parts = sums.index_add_(0, chunks.relation, parts)
    return parts[:, :feat_in, :feat].to(dtype).contiguous()


def of_edges(relations: Relations, x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
    """(E,) x[source] @ weight[relation] . grad[target] of each element, in the type of sums."""
    x, weight, grad = _wide(x), _wide(weight), _wide(grad)
    out = x.new_zeros(relations.edges)
    if not x.shape[1] or not grad.shape[1] or not relations.edges:
        return out
    rows = relations.by_target
    if not _has_kernels(x):
        found = [
            ((terms @ weight[r]) * grad[row]).sum(1) for r, row, terms in _apart(rows, x, None)
        ]
        return torch.cat(found)
    x, grad = _padded(x), _padded(grad)
    turned = _padded(weight.transpose(1, 2), grad.shape[1])
    _run_chunks(relations, True, {"x": x, "w": turned, "grad": grad, "da": out})
    return out


def _run_chunks(relations: Relations, edges: bool, arrays: dict[str, Tensor]) -> None:
    """Run the kernel for one of the gradients."""
    rows, chunks = relations.by_target, relations.by_target.chunks
    feat_in, feat, dtype = arrays["x"].shape[1], arrays["grad"].shape[1], arrays["x"].dtype
    problem = RgmsBackward(
        feat_in, feat, CHUNK, edges, DTYPES[dtype], IDTYPES[rows.rows.dtype], "a" in arrays
    )
    threads, target = default_threads(), target_of(relations.device)
    parallel = threads > 1 and len(rows.rows) * feat_in * feat >= WORK_OF_THREADS
    # All but whole vectors are powers of two.
    lanes = min(lanes_of(rgms.Rgms(DTYPES[dtype]), target), feat_in, feat)
    vectors = 4 if vector_bits(target) >= 512 else 2  # as there are registers for
    blocks = threads * BLOCKS_PER_THREAD if parallel else 0
    config = ChunkTiles(lanes, vectors=vectors, blocks=blocks)
    index = {
        "piece_ptr": chunks.piece_ptr, "chunk_ptr": chunks.chunk_ptr, "rows": rows.rows,
        "indptr": rows.indptr, "indices": rows.indices, "relation": chunks.relation,
    }  # fmt: skip
    sizes = {
        "pieces": len(chunks.relation), "chunks": len(chunks.chunk_ptr) - 1,
        "nnz_rows": len(rows.rows), "nnz": relations.edges, "m": relations.m, "n": relations.n,
        "relations": relations.count,
    }  # fmt: skip
    stages = partial(lower_template, rgms_backward, problem, config, target)
    _run(rows, (problem, config), target, stages, arrays, index, sizes)


def _run(
    rows: RelationRows, key: Any, target: Any, stages: Callable[[], Any],
    arrays: Mapping[str, Tensor], index: Mapping[str, Tensor], sizes: Mapping[str, int],
) -> None:  # fmt: skip
    """Compile a kernel if it is new, and run it on arrays that fit."""
    kernel = compiled(key, target, stages)
    made = rows.computed.get(key)
    if made is None:
        given = {name: x.numpy() for name, x in index.items()}
        found = kernel.compute({**given, **sizes})
        made = {n: torch.from_numpy(x) if is_array(x) else x for n, x in found.items()}
        rows.computed[key] = made
    named = {**arrays, **index, **sizes, **made}
    kernel.run_unchecked([named[name] for name in kernel.signature.passed])


def _has_kernels(x: Tensor) -> bool:
    """Whether there are kernels for the device."""
    return x.device.type == "cpu"


def _apart(
    rows: RelationRows, x: Tensor, values: Tensor | None
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each relation that has edges, with the rows and the gathered features of its elements."""
    counts = rows.indptr[1:] - rows.indptr[:-1]
    ends = rows.indptr[rows.row_ptr.long()].tolist()
    row = torch.repeat_interleave(rows.rows, counts.long())
    for r, (begin, end) in enumerate(pairwise(ends)):
        if begin < end:
            terms = x[rows.indices[begin:end].long()]
            if values is not None:
                terms = terms * values[begin:end, None]
            yield r, row[begin:end].long(), terms


def _weighted(arrays: dict[str, Tensor], values: Tensor | None) -> dict[str, Tensor]:
    return arrays if values is None else {**arrays, "a": _wide(values)}


def _widened(dtype: torch.dtype) -> torch.dtype:
    """The type of the sums."""
    return torch.promote_types(dtype, torch.float32)


def _wide(x: Tensor) -> Tensor:
    """As kernels take it: contiguous, in the type of the sums."""
    return x.detach().resolve_neg().to(_widened(x.dtype)).contiguous()


def _padded(x: Tensor, rows: int | None = None) -> Tensor:
    """With zeros for features that fill vectors, and for as many rows, if given."""
    x = _wide(x)
    size = whole_vectors(rgms.Rgms(DTYPES[x.dtype]), x.shape[-1], target_of(x.device))
    below = 0 if rows is None else rows - x.shape[-2]
    return pad(x, (0, size - x.shape[-1], 0, below)) if size != x.shape[-1] or below else x
