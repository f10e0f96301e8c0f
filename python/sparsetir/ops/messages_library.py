"""Messages, softmax and attention as torch operators, `torch.ops.sparsetir.*`, with gradients.

`rowptr`, `col` and `n` are a pattern as :func:`sparsetir.ops.structure.structure_of` takes it.
Features are (nodes or nnz, heads, feat), where heads and feat of an operand may be 1 to be the same
for all; those of edges come and go in the order of `col`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsetir.ops import message_kernels
from sparsetir.ops.library import mean_gradient
from sparsetir.ops.registry import define, save, save_inputs, saved
from sparsetir.ops.structure import structure_of


def _count(col: Tensor) -> Any:
    """Elements of a pattern."""
    return col.shape[-1]


def _features(*operands: Tensor | None) -> tuple[Any, ...]:
    """(heads, feat) of operands together."""
    return tuple(torch.broadcast_shapes(*(x.shape[1:] for x in operands if x is not None)))


def _like(*operands: Tensor | None) -> Tensor:
    return next(x for x in operands if x is not None)


def _summed_to(x: Tensor, operand: Tensor) -> Tensor:
    """Sums over heads and features that the operand is the same for."""
    dims = [d for d in (1, 2) if operand.shape[d] == 1 and x.shape[d] != 1]
    return x.sum(dims, keepdim=True) if dims else x


# -- messages reduced at rows ---------------------------------------------------------------------


def gspmm_kernel(
    rowptr: Tensor, col: Tensor, u: Tensor | None, e: Tensor | None, n: int, op: str, reduce: str,
    transposed: bool,
) -> Tensor:  # fmt: skip
    """(m, heads, feat) reduced messages; with `transposed` (n, ...) of u (m, ...)."""
    structure = structure_of(rowptr, col, n, "gspmm")
    structure = structure.transposed if transposed else structure
    return message_kernels.gspmm(structure, u, e, op, reduce)[0]


def _gspmm_fake(
    rowptr: Tensor, col: Tensor, u: Tensor | None, e: Tensor | None, n: int, op: str, reduce: str,
    transposed: bool,
) -> Tensor:  # fmt: skip
    rows = n if transposed else rowptr.shape[0] - 1
    return _like(u, e).new_empty((rows, *_features(u, e)))


def _gspmm_backward(ctx: Any, grad: Tensor) -> Any:
    rowptr, col, u, e, n, op, reduce, transposed = saved(ctx)
    _, _, for_u, for_e, *_ = ctx.needs_input_grad
    if reduce in ("max", "min"):
        _, arg = gspmm_arg(rowptr, col, u, e, n, op, reduce)
        found = _extremum_gradients(col, u, e, arg, op, grad, (for_u, for_e))
        return None, None, *found, None, None, None, None
    if reduce == "mean":
        grad = mean_gradient(grad, (rowptr[1:] - rowptr[:-1])[:, None, None])
    source, target = ("v", "u") if transposed else ("u", "v")
    grad_u = grad_e = None
    if for_u:
        with_e = op in ("mul", "div")
        back = op if with_e else "copy_u"
        grad_u = gspmm(
            rowptr, col, grad, e if with_e else None, n, back, "sum", not transposed
        )  # fmt: skip
        grad_u = _summed_to(grad_u, u)
    if for_e and op in ("mul", "div"):
        dot = e.shape[2] == 1 and grad.shape[2] != 1
        step = "dot" if dot else "mul"
        grad_e = _summed_to(gsddmm(rowptr, col, u, grad, n, step, source, target), e)
        grad_e = -grad_e / (e * e) if op == "div" else grad_e
    elif for_e:
        grad_e = _summed_to(grad, e)
        grad_e = gsddmm(rowptr, col, grad_e, None, n, "copy_lhs", target, "e")
        grad_e = -grad_e if op == "sub" else grad_e
    return None, None, grad_u, grad_e, None, None, None, None


gspmm = define(
    "gspmm(Tensor rowptr, Tensor col, Tensor? u, Tensor? e, SymInt n, str op, str reduce, "
    "bool transposed) -> Tensor",
    gspmm_kernel, _gspmm_fake, _gspmm_backward, save_inputs,
)  # fmt: skip


# -- greatest and least messages, and whose they are ----------------------------------------------


def _gspmm_arg(
    rowptr: Tensor, col: Tensor, u: Tensor | None, e: Tensor | None, n: int, op: str, reduce: str
) -> tuple[Tensor, Tensor]:
    found = message_kernels.gspmm(structure_of(rowptr, col, n, "gspmm"), u, e, op, reduce, True)
    assert found[1] is not None
    return found[0], found[1]


def _gspmm_arg_fake(
    rowptr: Tensor, col: Tensor, u: Tensor | None, e: Tensor | None, n: int, op: str, reduce: str
) -> tuple[Tensor, Tensor]:
    out = _gspmm_fake(rowptr, col, u, e, n, op, reduce, False)
    return out, out.new_empty(out.shape, dtype=torch.int64)


def _gspmm_arg_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, col, u, e, *_, op, _ = inputs
    save(ctx, col, u, e, output[1])
    ctx.op = op
    ctx.mark_non_differentiable(output[1])


def _gspmm_arg_backward(ctx: Any, grad: Tensor, _: Any) -> Any:
    col, u, e, arg = saved(ctx)
    wanted = ctx.needs_input_grad[2:4]
    return None, None, *_extremum_gradients(col, u, e, arg, ctx.op, grad, wanted), None, None, None


def _extremum_gradients(
    col: Tensor, u: Tensor | None, e: Tensor | None, arg: Tensor, op: str, grad: Tensor, wanted: Any
) -> tuple[Tensor | None, Tensor | None]:
    """For u and e, out of torch's own operators: each from the one message that it is."""
    columns = col[0] if col.dim() == 2 else col
    nothing = not _count(col)
    found, edge = arg >= 0, arg.clamp(min=0)
    column = edge if nothing else columns.long()[edge]

    def taken(x: Tensor, place: Tensor) -> Tensor:
        """The operand's part in each message that was the greatest or least."""
        return grad if nothing else x.expand(-1, *place.shape[1:]).gather(0, place)

    def scattered(terms: Tensor, place: Tensor, operand: Tensor) -> Tensor:
        # Sums of 16-bit numbers are in float32.
        wide = torch.promote_types(terms.dtype, torch.float32)
        zeros = terms.new_zeros((operand.shape[0], *place.shape[1:]), dtype=wide)
        if not nothing:
            zeros = zeros.scatter_add(0, place, torch.where(found, terms, 0).to(wide))
        return _summed_to(zeros, operand).to(operand.dtype)

    grad_u = grad_e = None
    if wanted[0] and u is not None:
        terms = grad
        if op in ("mul", "div") and e is not None:
            other = taken(e, edge)
            terms = grad * other if op == "mul" else grad / other
        grad_u = scattered(terms, column, u)
    if wanted[1] and e is not None:
        terms = -grad if op == "sub" else grad
        if op == "mul" and u is not None:
            terms = grad * taken(u, column)
        elif op == "div" and u is not None:
            other = taken(e, edge)
            terms = -grad * taken(u, column) / (other * other)
        grad_e = scattered(terms, edge, e)
    return grad_u, grad_e


gspmm_arg = define(
    "gspmm_arg(Tensor rowptr, Tensor col, Tensor? u, Tensor? e, SymInt n, str op, str reduce) "
    "-> (Tensor, Tensor)",
    _gspmm_arg, _gspmm_arg_fake, _gspmm_arg_backward, _gspmm_arg_save,
)  # fmt: skip


# -- values of edges ------------------------------------------------------------------------------


def gsddmm_kernel(
    rowptr: Tensor, col: Tensor, lhs: Tensor | None, rhs: Tensor | None, n: int, op: str,
    lhs_target: str, rhs_target: str,
) -> Tensor:  # fmt: skip
    """(nnz, heads, feat) values of edges, of operands at "u", "v" or "e"; feat is 1 for "dot"."""
    structure = structure_of(rowptr, col, n, "gsddmm")
    return message_kernels.gsddmm(structure, lhs, rhs, op, (lhs_target, rhs_target))


def _gsddmm_fake(
    rowptr: Tensor, col: Tensor, lhs: Tensor | None, rhs: Tensor | None, n: int, op: str,
    lhs_target: str, rhs_target: str,
) -> Tensor:  # fmt: skip
    heads, feat = _features(lhs, rhs)
    return _like(lhs, rhs).new_empty((_count(col), heads, 1 if op == "dot" else feat))


def _gsddmm_backward(ctx: Any, grad: Tensor) -> Any:
    rowptr, col, lhs, rhs, n, op, lhs_target, rhs_target = saved(ctx)
    _, _, for_lhs, for_rhs, *_ = ctx.needs_input_grad
    pattern = rowptr, col, n
    grad_lhs = grad_rhs = None
    if for_lhs:
        if op in ("mul", "dot"):
            grad_lhs = _collected(pattern, grad, lhs, lhs_target, rhs, rhs_target)
        elif op == "div":
            grad_lhs = _collected(pattern, grad, lhs, lhs_target, 1 / rhs, rhs_target)
        else:
            grad_lhs = _collected(pattern, grad, lhs, lhs_target)
    if for_rhs:
        if op in ("mul", "div", "dot"):
            grad_rhs = _collected(pattern, grad, rhs, rhs_target, lhs, lhs_target)
            grad_rhs = -grad_rhs / (rhs * rhs) if op == "div" else grad_rhs
        else:
            grad_rhs = _collected(pattern, -grad if op == "sub" else grad, rhs, rhs_target)
    return None, None, grad_lhs, grad_rhs, None, None, None, None


def _collected(
    pattern: tuple[Tensor, Tensor, Any], grad: Tensor, operand: Tensor, target: str,
    other: Tensor | None = None, other_target: str = "e",
) -> Tensor:  # fmt: skip
    """Sums, at the operand's nodes or edges, of the gradients of edges times the other operand."""
    rowptr, col, n = pattern
    if target != "e" and other is not None and other_target not in ("e", target):
        found = gspmm(rowptr, col, other, grad, n, "mul", "sum", target == "u")
        return _summed_to(found, operand).expand_as(operand)
    if other is not None:
        grad = (
            grad * other
            if other_target == "e"
            else gsddmm(rowptr, col, grad, other, n, "mul", "e", other_target)
        )
    # Of a dot product with the same for all features, the gradient is the same for all of them.
    grad = _summed_to(grad, operand)
    if target != "e":
        grad = gspmm(rowptr, col, None, grad, n, "copy_e", "sum", target == "u")
    return grad.expand_as(operand)


gsddmm = define(
    "gsddmm(Tensor rowptr, Tensor col, Tensor? lhs, Tensor? rhs, SymInt n, str op, "
    "str lhs_target, str rhs_target) -> Tensor",
    gsddmm_kernel, _gsddmm_fake, _gsddmm_backward, save_inputs,
)  # fmt: skip


# -- softmax of the elements of rows --------------------------------------------------------------


def segment_softmax_kernel(rowptr: Tensor, col: Tensor, x: Tensor, n: int) -> Tensor:
    """(batch, nnz, heads) softmax over the elements of each row."""
    return message_kernels.softmax(structure_of(rowptr, col, n, "sparse_softmax"), x)


def _softmax_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rowptr, col, _, n = inputs
    save(ctx, rowptr, col, output)
    ctx.n = n


def _softmax_gradient(ctx: Any, grad: Tensor) -> Any:
    rowptr, col, y = saved(ctx)
    return None, None, segment_softmax_backward(rowptr, col, y, grad, ctx.n), None


segment_softmax = define(
    "segment_softmax(Tensor rowptr, Tensor col, Tensor x, SymInt n) -> Tensor",
    segment_softmax_kernel,
    lambda rowptr, col, x, n: x.new_empty(x.shape),
    _softmax_gradient,
    _softmax_save,
)


def _softmax_backward(rowptr: Tensor, col: Tensor, y: Tensor, grad: Tensor, n: int) -> Tensor:
    return message_kernels.softmax_backward(structure_of(rowptr, col, n), y, grad)


def _softmax_second(ctx: Any, grad: Tensor) -> Any:
    rowptr, col, y, g, n = saved(ctx)
    *_, for_y, for_g, _ = ctx.needs_input_grad

    def row_sums(x: Tensor) -> Tensor:
        """Of each element's row, (batch, nnz, heads)."""
        sums = gspmm(rowptr, col, None, x.transpose(0, 1), n, "copy_e", "sum", False)
        return gsddmm(rowptr, col, sums, None, n, "copy_lhs", "v", "e").transpose(0, 1)

    grad_y = grad_g = None
    if for_y:
        grad_y = grad * (g - row_sums(y * g)) - g * row_sums(y * grad)
    if for_g:
        grad_g = segment_softmax_backward(rowptr, col, y, grad, n)
    return None, None, grad_y, grad_g, None


segment_softmax_backward = define(
    "segment_softmax_backward(Tensor rowptr, Tensor col, Tensor y, Tensor grad, SymInt n) "
    "-> Tensor",
    _softmax_backward,
    lambda rowptr, col, y, grad, n: y.new_empty(y.shape),
    _softmax_second,
    save_inputs,
)


# -- attention ------------------------------------------------------------------------------------


def edge_attention_kernel(
    rowptr: Tensor, col: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> Tensor:
    """(m, heads, width) attention of q (m, heads, feat) to k, of v, along the elements."""
    structure = structure_of(rowptr, col, k.shape[0], "attention")
    return message_kernels.attention(structure, q, k, v, scale)


def _attention_backward(ctx: Any, grad: Tensor) -> Any:
    rowptr, col, q, k, v, scale = saved(ctx)
    wanted = ctx.needs_input_grad[2:5]
    return None, None, *attention_gradients(rowptr, col, q, k, v, grad, scale, wanted), None


def attention_gradients(
    rowptr: Tensor, col: Tensor, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, scale: float,
    wanted: Any,
) -> list[Any]:  # fmt: skip
    """Those of attention for q, k and v, each None where it is not wanted; differentiable."""
    for_q, for_k, for_v = wanted
    n, dtype = k.shape[0], q.dtype
    # Weights are made again rather than kept, from scores that 16 bits would not do for.
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v, grad = (x.to(wide) for x in (q, k, v, grad))
    scores = gsddmm(rowptr, col, k, q, n, "dot", "u", "v") * scale
    weights = segment_softmax(rowptr, col, scores.permute(2, 0, 1), n)
    found: list[Any] = [None, None, None]
    if for_v:
        by_edge = weights.permute(1, 2, 0)
        found[2] = gspmm(rowptr, col, grad, by_edge, n, "mul", "sum", True).to(dtype)
    if for_q or for_k:
        of_weights = gsddmm(rowptr, col, v, grad, n, "dot", "u", "v").permute(2, 0, 1)
        of_scores = segment_softmax_backward(rowptr, col, weights, of_weights, n)
        of_scores = of_scores.permute(1, 2, 0) * scale
        if for_q:
            found[0] = gspmm(rowptr, col, k, of_scores, n, "mul", "sum", False).to(dtype)
        if for_k:
            found[1] = gspmm(rowptr, col, q, of_scores, n, "mul", "sum", True).to(dtype)
    return found


edge_attention = define(
    "edge_attention(Tensor rowptr, Tensor col, Tensor q, Tensor k, Tensor v, float scale) "
    "-> Tensor",
    edge_attention_kernel,
    lambda rowptr, col, q, k, v, scale: q.new_empty((*q.shape[:-1], v.shape[-1])),
    _attention_backward,
    save_inputs,
)
