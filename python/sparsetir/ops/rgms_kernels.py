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
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsetir.arrays import is_array
from sparsetir.compiled import compiled
from sparsetir.lower import lower_template
from sparsetir.ops.relation_orders import where_products_first
from sparsetir.ops.relations import CHUNK, RelationRows, Relations
from sparsetir.ops.structure import DTYPES, call_plan, target_of
from sparsetir.relational_plan import relational_plan
from sparsetir.relational_request import RelationalRequest
from sparsetir.request import default_threads
from sparsetir.schedules.default import is_gpu, vector_bits
from sparsetir.schedules.operators import rgms
from sparsetir.schedules.search.choose_rgms import choose_rgms, lanes_of, whole_vectors
from sparsetir.schedules.templates import rgms as template
from sparsetir.schedules.templates import rgms_backward
from sparsetir.schedules.templates.rgms_backward import ChunkTiles, RgmsBackward
from sparsetir.waking import pays

__all__ = ["of_edges", "of_nodes", "of_weights"]

BLOCKS_PER_THREAD = 4
IDTYPES = {torch.int32: "int32", torch.int64: "int64"}


def of_nodes(
    relations: Relations, x: Tensor, weight: Tensor, values: Tensor | None, transposed: bool
) -> Tensor:
    """(m, feat) sums over edges of their value times x[source] @ weight[relation].

    x : (n, feat_in)
    weight : (relations, feat_in, feat), or (relations, blocks, feat_in / blocks, feat / blocks) of
        what is on the diagonal
    values : (E,) of the elements; by default ones
    transposed : of the edges in the other direction: x is (m, feat_in), the result (n, feat)
    """
    rows = relations.rows(transposed)
    m, n = (relations.n, relations.m) if transposed else (relations.m, relations.n)
    *blocks, feat_in, feat = weight.shape[1:]
    count, dtype = prod(blocks), x.dtype
    if not m * count * feat * feat_in * relations.edges:
        return x.new_zeros(m, count * feat)
    if not _has_kernels(x):
        if blocks:
            of_blocks = zip(x.chunk(count, 1), weight.unbind(1), strict=True)
            return torch.cat([of_nodes(relations, *b, values, transposed) for b in of_blocks], 1)
        if is_gpu(target_of(x.device)):
            return _by_plan(rows, m, n, x, weight, values)
        out, wide = _wide(x).new_zeros(m, feat), _wide(weight)
        for r, row, terms in _apart(rows, _wide(x), values):
            out.index_add_(0, row, terms @ wide[r])
        return out.to(dtype)
    found = where_products_first(rows, m, n, count * feat_in, count * feat, count)
    if found is None and not blocks:
        return _by_plan(rows, m, n, x, weight, values)
    x = _padded(x.unflatten(1, (*blocks, feat_in)) if blocks else x)
    weight = _padded(weight, x.shape[-1])
    shape = (*blocks, weight.shape[-1])
    if found is None:
        out = x.new_empty(m, *shape)
        _run_nodes(rows, x, weight, values, out)
    else:
        of_sums = of_others = None
        if values is not None:
            of_sums, of_others = found.values(values, relations.lasts(values))
        products = x.new_empty(found.sums.n, *shape)
        _run_nodes(found.products, x, weight, None, products)
        out = found.sums.run("spmm", (products.flatten(1),), of_sums).view(m, *shape)
        del products
        if found.others is not None:
            _run_nodes(found.others, x, weight, of_others, out, added=True)
    return out[..., :feat].flatten(1).to(dtype).contiguous()


def _run_nodes(
    rows: RelationRows, x: Tensor, weight: Tensor, values: Tensor | None, out: Tensor,
    added: bool = False,
) -> None:  # fmt: skip
    """Set the result, or add to it, by the kernel that sums up first.

    x, weight, out : with a dimension for blocks of features, if there are any
    """
    index_type, (*blocks, feat_in, feat) = IDTYPES[rows.rows.dtype], weight.shape[1:]
    problem = rgms.Rgms(
        DTYPES[x.dtype], index_type, values is not None, added=added, in_blocks=bool(blocks)
    )
    target = target_of(x.device)
    config = choose_rgms(
        problem,
        len(rows.rows),
        feat_in,
        feat,
        target,
        default_threads(),
        len(weight),
        prod(blocks),
    )
    arrays = _weighted({"x": x, "w": weight, "out": out}, values)
    index = {
        "row_ptr": rows.row_ptr, "rows": rows.rows, "indptr": rows.indptr, "indices": rows.indices,
    }  # fmt: skip
    numbers = {
        "relations": len(weight), "m": len(out), "n": len(x), "nnz_rows": len(rows.rows),
        "nnz": len(rows.indices), "feat_in": feat_in, "feat": feat,
    }  # fmt: skip
    if blocks:
        numbers["blocks"] = blocks[0]
    stages = partial(lower_template, template, problem, config, target)
    _run(rows, (problem, config), target, stages, arrays, index, numbers)


def _by_plan(
    rows: RelationRows, m: int, n: int, x: Tensor, weight: Tensor, values: Tensor | None
) -> Tensor:
    """As :func:`of_nodes`, by the plan of these sizes; m, n : rows and columns."""
    (count, feat_in, feat), dtype, target = weight.shape, x.dtype, target_of(x.device)
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


def of_weights(
    relations: Relations, x: Tensor, grad: Tensor, values: Tensor | None, blocks: int = 0
) -> Tensor:
    """(relations, feat_in, feat) sums over edges of their value times x[source]^T @ grad[target].

    x, grad : (n, feat_in) and (m, feat)
    values : (E,) of the elements; by default ones
    blocks : of features, of which what is on the diagonal is wanted, (relations, blocks,
        feat_in / blocks, feat / blocks); 0 for none
    """
    dims, dtype = ([blocks] if blocks else []), x.dtype
    feat_in, feat = (size // max(blocks, 1) for size in (x.shape[1], grad.shape[1]))
    found = x.new_zeros(relations.count, *dims, feat_in, feat)
    if not found.numel() or not relations.edges:
        return found
    if not _has_kernels(x):
        if blocks:
            of_blocks = zip(x.chunk(blocks, 1), grad.chunk(blocks, 1), strict=True)
            return torch.stack([of_weights(relations, *b, values) for b in of_blocks], 1)
        wide = _wide(grad)
        for r, row, terms in _apart(relations.by_target, _wide(x), values):
            found[r] = (terms.T @ wide[row]).to(dtype)
        return found
    if blocks:
        x, grad = x.unflatten(1, (blocks, feat_in)), grad.unflatten(1, (blocks, feat))
    x, grad, chunks = _padded(x), _padded(grad), relations.by_target.chunks
    parts = x.new_empty(len(chunks.relation), *dims, x.shape[-1], grad.shape[-1])
    arrays = _weighted({"x": x, "grad": grad, "dw": parts}, values)
    _run_chunks(relations, False, arrays)
    if not chunks.one_each:
        sums = parts.new_zeros(relations.count, *parts.shape[1:])
        parts = sums.index_add_(0, chunks.relation, parts)
    return parts[..., :feat_in, :feat].to(dtype).contiguous()


def of_edges(relations: Relations, x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
    """(E,) x[source] @ weight[relation] . grad[target] of each element, in the type of sums.

    weight : as of :func:`of_nodes`
    """
    if weight.dim() == 4:
        count = weight.shape[1]
        of_blocks = zip(x.chunk(count, 1), weight.unbind(1), grad.chunk(count, 1), strict=True)
        out = _wide(x).new_zeros(relations.edges)
        for block in of_blocks:
            out += of_edges(relations, *block)
        return out
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
    (*blocks, feat_in), feat = arrays["x"].shape[1:], arrays["grad"].shape[-1]
    dtype = arrays["x"].dtype
    problem = RgmsBackward(
        feat_in, feat, CHUNK, edges, DTYPES[dtype], IDTYPES[rows.rows.dtype], "a" in arrays,
        bool(blocks),
    )  # fmt: skip
    threads, target = default_threads(), target_of(relations.device)
    parallel = pays(threads, len(rows.rows) * prod(blocks) * feat_in * feat)
    # All but whole vectors are powers of two.
    lanes = min(lanes_of(rgms.Rgms(DTYPES[dtype]), target), feat_in, feat)
    vectors = 4 if vector_bits(target) >= 512 else 2  # as there are registers for
    parts = threads * BLOCKS_PER_THREAD if parallel else 0
    config = ChunkTiles(lanes, vectors=vectors, blocks=parts)
    index = {
        "piece_ptr": chunks.piece_ptr, "chunk_ptr": chunks.chunk_ptr, "rows": rows.rows,
        "indptr": rows.indptr, "indices": rows.indices, "relation": chunks.relation,
    }  # fmt: skip
    sizes = {
        "pieces": len(chunks.relation), "chunks": len(chunks.chunk_ptr) - 1,
        "nnz_rows": len(rows.rows), "nnz": relations.edges, "m": relations.m, "n": relations.n,
        "relations": relations.count,
    }  # fmt: skip
    if blocks:
        sizes["blocks"] = blocks[0]
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
