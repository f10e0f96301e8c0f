"""Calls of the kernels of relational gather-matmul-scatter on torch tensors, without gradients.

Plans provide the kernels of sums at nodes, which include gradients of features, and on GPUs those
of gradients for weights. On CPUs this module calls the kernels of gradients for weights itself,
since relations come in pieces whose number depends on the graph and whose results are added up.
Elements are the edges in the order of the rows of relations. Results are rounded once.

Kernels read 16-bit types directly: CPUs compute in float32, GPUs on tensor cores where they have
any, which round the sums that a row gathers. Where products come first, operands are converted to
float32 beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad
from tvm.target import Target

from sparsetir.ops.relations import RelationRows, Relations, where_products_first
from sparsetir.ops.tensors import DTYPES, call_plan, kernel_by, launch, target_of, wide_tensor
from sparsetir.planning.along_request import relations_request
from sparsetir.planning.plan import plan_of
from sparsetir.planning.request import default_threads
from sparsetir.planning.run_plan import Plan
from sparsetir.runtime.arrays import dtype_name
from sparsetir.runtime.pool import profitable
from sparsetir.schedules.operators.rgms import Rgms, RgmsGradient
from sparsetir.schedules.search.choose_rgms import lanes_of, whole_vectors
from sparsetir.schedules.targets import is_gpu, vector_registers
from sparsetir.schedules.templates.rgms_backward import ChunkTiles

BLOCKS_PER_THREAD = 4


def node_sums(
    relations: Relations, x: Tensor, weight: Tensor, values: Tensor | None, transposed: bool
) -> Tensor:
    """(m, feat) sums over edges of their value times x[source] @ weight[relation].

    x : (n, feat_in)
    weight : (relations, feat_in, feat), or (relations, blocks, feat_in / blocks, feat / blocks) of
        the diagonal blocks
    values : (E,) values of the elements; by default ones
    transposed : whether edges are reversed: x is (m, feat_in), the result (n, feat)
    """
    rows = relations.rows(transposed)
    m, n = (relations.n, relations.m) if transposed else (relations.m, relations.n)
    *blocks, feat_in, feat = weight.shape[1:]
    count, dtype = prod(blocks), x.dtype
    if not m * count * feat * feat_in * relations.edges:
        return x.new_zeros(m, count * feat)
    first = None
    if _is_gpu(x):
        if blocks:
            of_blocks = zip(x.chunk(count, 1), weight.unbind(1), strict=True)
            return torch.cat([node_sums(relations, *b, values, transposed) for b in of_blocks], 1)
    else:
        first = where_products_first(rows, m, n, count * feat_in, count * feat, count)
    x = x.unflatten(1, (*blocks, feat_in)) if blocks else x
    if first is None:
        return _sums(rows, m, x, weight, values).flatten(1).to(dtype)
    x = _padded(wide_tensor(x))
    weight = _padded(wide_tensor(weight), x.shape[-1])
    of_sums = of_others = None
    if values is not None:
        of_sums, of_others = first.values(values, relations.is_cached(values))
    products = _sums(first.products, first.sums.n, x, weight, None)
    out = first.sums.run("spmm", (products.flatten(1),), of_sums).view(m, *products.shape[1:])
    del products
    if first.others is not None:
        _sums(first.others, m, x, weight, of_others, out)
    return out[..., :feat].flatten(1).to(dtype).contiguous()


def _sums(
    rows: RelationRows,
    m: int,
    x: Tensor,
    weight: Tensor,
    values: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    """:func:`node_sums` by the plan of these sizes, which sums before it multiplies.

    x, weight : with a dimension for blocks of features, if any
    out : if given, the array that the sums are added to
    """
    count, *blocks, feat_in, feat = weight.shape
    shape, sizes, added = (count, m, len(x)), (feat_in, feat), out is not None

    def make(rows: RelationRows) -> Plan:
        types, wide, weighted = _types(rows, x), _wider(x.dtype), values is not None
        of_values = wide if weighted else None
        problem = Rgms(*types, weighted, wide, of_values, added=added, in_blocks=bool(blocks))
        return _plan(rows, problem, shape, sizes, prod(blocks) if blocks else None)

    kind = "sums", x.dtype, values is None, added, *weight.shape[1:], default_threads()
    run = rows.derived(kind, make)
    return _called(run, (x, weight), values, out)


def _plan(
    rows: RelationRows,
    problem: Rgms | RgmsGradient,
    shape: tuple[int, int, int],
    sizes: tuple[int, int],
    blocks: int | None = None,
) -> Plan:
    """The plan for a problem on these rows; shape : relations, rows and columns."""
    target, threads = target_of(rows.rows.device), default_threads()
    return plan_of(relations_request(rows.pattern(shape), problem, sizes, threads, target, blocks))


def _called(
    run: Plan, operands: Sequence[Tensor], values: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """Run a plan; out : if given, the array that it adds to."""
    detached = [x.detach() for x in operands]
    values = None if values is None else wide_tensor(values)
    if out is None:
        return call_plan(run, detached, values)
    return run(*detached, values=values, out=out)


def _types(rows: RelationRows, x: Tensor) -> tuple[str, str]:
    return DTYPES[x.dtype], dtype_name(rows.rows)


def _wider(dtype: torch.dtype) -> str | None:
    """The accumulator's type for a 16-bit type; None for wider types."""
    return None if _widened(dtype) == dtype else DTYPES[_widened(dtype)]


def weight_gradients(
    relations: Relations, x: Tensor, grad: Tensor, values: Tensor | None, blocks: int = 0
) -> Tensor:
    """(relations, feat_in, feat) sums over edges of their value times x[source]^T @ grad[target].

    x, grad : (n, feat_in) and (m, feat)
    values : (E,) values of the elements; by default ones
    blocks : number of diagonal blocks, the only ones computed, (relations, blocks,
        feat_in / blocks, feat / blocks); 0 for whole matrices
    """
    dims, dtype = ([blocks] if blocks else []), x.dtype
    feat_in, feat = (size // max(blocks, 1) for size in (x.shape[1], grad.shape[1]))
    zeros = x.new_zeros(relations.count, *dims, feat_in, feat)
    if not zeros.numel() or not relations.edges:
        return zeros
    if _is_gpu(x):
        if blocks:
            of_blocks = zip(x.chunk(blocks, 1), grad.chunk(blocks, 1), strict=True)
            return torch.stack([weight_gradients(relations, *b, values) for b in of_blocks], 1)
        return _gradient(relations, (x, grad), values, (feat_in, feat)).to(dtype)
    x, grad = (_padded(y.unflatten(1, (max(blocks, 1), -1))) for y in (x, grad))
    pieces = relations.by_target.pieces
    shape = len(pieces.relation), *dims, x.shape[-1], grad.shape[-1]
    parts = x.new_empty(shape, dtype=_widened(dtype))
    arrays = {"x": x, "grad": grad, "out": parts if blocks else parts[:, None]}
    _run_pieces(
        relations, False, arrays if values is None else {**arrays, "a": wide_tensor(values)}
    )
    if not pieces.one_each:
        sums = parts.new_zeros(relations.count, *parts.shape[1:])
        parts = sums.index_add_(0, pieces.relation, parts)
    return parts[..., :feat_in, :feat].to(dtype).contiguous()


def edge_products(relations: Relations, x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
    """(E,) x[source] @ weight[relation] . grad[target] of each element, in the type of sums.

    weight : as for :func:`node_sums`
    """
    out = x.new_zeros(relations.edges, dtype=_widened(x.dtype))
    if not x.shape[1] or not grad.shape[1] or not relations.edges:
        return out
    weight = weight if weight.dim() == 4 else weight[:, None]
    blocks = weight.shape[1]
    if _is_gpu(x):
        parts = zip(x.chunk(blocks, 1), grad.chunk(blocks, 1), weight.unbind(1), strict=True)
        for part in parts:
            out += _gradient(relations, part, None, (weight.shape[2], weight.shape[3]))
        return out
    x, grad = (_padded(y.unflatten(1, (blocks, -1))) for y in (x, grad))
    turned = _padded(weight.mT, grad.shape[-1])
    _run_pieces(relations, True, {"x": x, "w": turned, "grad": grad, "out": out})
    return out


def _gradient(
    relations: Relations, operands: Sequence[Tensor], values: Tensor | None, sizes: tuple[int, int]
) -> Tensor:
    """A gradient on a GPU by its plan: that for edge weights if operands include W, else for W."""
    rows, x = relations.by_target, operands[0]
    edges, shape = len(operands) == 3, (relations.count, relations.m, relations.n)

    def make(rows: RelationRows) -> Plan:
        wide = None if values is None else _wider(x.dtype)
        problem = RgmsGradient(*_types(rows, x), values is not None, wide, edges)
        return _plan(rows, problem, shape, sizes)

    kind = "gradient", x.dtype, values is None, edges, *sizes, default_threads()
    run = rows.derived(kind, make)
    return _called(run, operands, values)


def _run_pieces(relations: Relations, edges: bool, arrays: dict[str, Tensor]) -> None:
    """Run the kernel of gradients on a CPU: for edge weights if `edges`, else for W."""
    rows, pieces = relations.by_target, relations.by_target.pieces
    (blocks, *_), sizes = arrays["x"].shape[1:], (arrays["x"].shape[2], arrays["grad"].shape[2])
    types, threads = (DTYPES[arrays["x"].dtype], dtype_name(rows.rows)), default_threads()
    problem = RgmsGradient(*types, "a" in arrays, _wider(arrays["x"].dtype), edges, in_blocks=True)
    parallel = profitable(threads, len(rows.rows) * blocks * sizes[0] * sizes[1])
    parts = threads * BLOCKS_PER_THREAD if parallel else 0
    kernel = kernel_by(_tiles, problem, target_of(relations.device), parts, *sizes)
    index = {"row_ptr": pieces.row_ptr, "rows": rows.rows, "indptr": rows.indptr}
    index |= {"indices": rows.indices, "relation": pieces.relation}
    count = len(pieces.relation)
    index |= {"pieces": count, "relations": relations.count if edges else count}
    index |= {"nnz_rows": len(rows.rows), "nnz": relations.edges, "m": relations.m}
    index |= {"n": relations.n, "blocks": blocks, "feat_in": sizes[0], "feat": sizes[1]}
    computed = rows.derived(kernel, lambda _: kernel.compute_passed(index))
    launch(kernel, {**arrays, **index, **computed})


def _tiles(
    problem: RgmsGradient, target: Target, parts: int, feat_in: int, feat: int
) -> ChunkTiles:
    # Sizes below a vector are powers of two.
    lanes = min(lanes_of(Rgms(problem.dtype), target), feat_in, feat)
    vectors = 4 if vector_registers(target)[1] >= 32 else 2
    return ChunkTiles(feat_in, feat, lanes=lanes, vectors=vectors, blocks=parts)


def _is_gpu(x: Tensor) -> bool:
    return is_gpu(target_of(x.device))


def _widened(dtype: torch.dtype) -> torch.dtype:
    """The accumulator's type."""
    return torch.promote_types(dtype, torch.float32)


def _padded(x: Tensor, rows: int | None = None) -> Tensor:
    """Pad x with zeros to whole vectors of features and to `rows` rows; contiguous."""
    x = x.detach().resolve_neg().contiguous()
    size = whole_vectors(Rgms(DTYPES[x.dtype]), x.shape[-1], target_of(x.device))
    below = 0 if rows is None else rows - x.shape[-2]
    return pad(x, (0, size - x.shape[-1], 0, below)) if size != x.shape[-1] or below else x
