"""Messages, softmax and attention as torch operators, `torch.ops.sparsetir.*`, with gradients.

`rowptr`, `col` and `n` are a pattern as :func:`sparsetir.ops.structure.structure_of` takes it.
Features are (nodes or nnz, heads, feat), where heads and feat of an operand may be 1 to be
broadcast; those of edges are read and returned in the order of `col`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from sparsetir.ops import message_kernels
from sparsetir.ops.message_kernels import features_of
from sparsetir.ops.registry import Gradients, Operation, Operator
from sparsetir.ops.structure import structure_of
from sparsetir.reductions import EXTREMA, REDUCERS


def _summed_to(x: Tensor, operand: Tensor) -> Tensor:
    """Sum x over the heads and features that the operand is broadcast over."""
    dims = [d for d in (1, 2) if operand.shape[d] == 1 and x.shape[d] != 1]
    return x.sum(dims, keepdim=True) if dims else x


@dataclass
class Gspmm(Operation[Tensor]):
    """(m, heads, feat) reduced messages; if `transposed`, (n, ...) from u (m, ...)."""

    rowptr: Tensor
    col: Tensor
    u: Tensor | None
    e: Tensor | None
    n: int
    op: str
    reduce: str
    transposed: bool

    @property
    def copies(self) -> bool:
        return REDUCERS[self.reduce].steps is not None

    def run(self) -> Tensor:
        structure = structure_of(self.rowptr, self.col, self.n, "gspmm")
        structure = structure.transposed if self.transposed else structure
        return message_kernels.gspmm(structure, self.u, self.e, self.op, self.reduce)[0]

    def fake(self) -> Tensor:
        like, features = features_of(self.u, self.e)
        rows = self.n if self.transposed else self.rowptr.shape[0] - 1
        return like.new_empty((rows, *features))

    def gradients(self, grad: Tensor) -> Gradients:
        rowptr, col, n, u, e, op = self.rowptr, self.col, self.n, self.u, self.e, self.op
        if self.reduce in EXTREMA:
            _, arg = gspmm_arg(rowptr, col, u, e, n, op, self.reduce)
            return gradients_of_messages(col, u, e, arg, op, grad)
        if REDUCERS[self.reduce].steps is not None:
            return gradients_in_steps(rowptr, col, u, e, n, op, self.reduce, self.results, grad)
        if REDUCERS[self.reduce].is_scaled:
            grad = mean_gradient(grad, (rowptr[1:] - rowptr[:-1])[:, None, None])
        source, target = ("v", "u") if self.transposed else ("u", "v")
        with_e = op in ("mul", "div")

        def for_u() -> Tensor:
            assert u is not None
            back, by = (op, e) if with_e else ("copy_u", None)
            out = gspmm(rowptr, col, grad, by, n, back, "sum", not self.transposed)
            return _summed_to(out, u)

        def for_e() -> Tensor:
            assert e is not None
            if not with_e:
                out = _summed_to(grad, e)
                out = gsddmm(rowptr, col, out, None, n, "copy_lhs", target, "e")
                return -out if op == "sub" else out
            step = "dot" if e.shape[2] == 1 and grad.shape[2] != 1 else "mul"
            out = _summed_to(gsddmm(rowptr, col, u, grad, n, step, source, target), e)
            return -out / (e * e) if op == "div" else out

        return {"u": for_u, "e": for_e}


gspmm = Operator("gspmm", Gspmm)


@dataclass
class GspmmArg(Operation[tuple[Tensor, Tensor]]):
    """Greatest or least messages, and the elements that they come from."""

    rowptr: Tensor
    col: Tensor
    u: Tensor | None
    e: Tensor | None
    n: int
    op: str
    reduce: str
    keeps = (1,)
    unused = ("rowptr",)
    aside = 1

    def run(self) -> tuple[Tensor, Tensor]:
        structure = structure_of(self.rowptr, self.col, self.n, "gspmm")
        out, arg = message_kernels.gspmm(structure, self.u, self.e, self.op, self.reduce, True)
        assert arg is not None
        return out, arg

    def fake(self) -> tuple[Tensor, Tensor]:
        like, features = features_of(self.u, self.e)
        out = like.new_empty((self.rowptr.shape[0] - 1, *features))
        return out, out.new_empty(out.shape, dtype=torch.int64)

    def gradients(self, grad: Tensor) -> Gradients:
        return gradients_of_messages(self.col, self.u, self.e, self.results[1], self.op, grad)


gspmm_arg = Operator("gspmm_arg", GspmmArg)


@dataclass
class Gsddmm(Operation[Tensor]):
    """(nnz, heads, feat) edge values from operands at "u", "v" or "e"; feat is 1 for "dot"."""

    rowptr: Tensor
    col: Tensor
    lhs: Tensor | None
    rhs: Tensor | None
    n: int
    op: str
    lhs_target: str
    rhs_target: str

    def run(self) -> Tensor:
        structure = structure_of(self.rowptr, self.col, self.n, "gsddmm")
        targets = self.lhs_target, self.rhs_target
        return message_kernels.gsddmm(structure, self.lhs, self.rhs, self.op, targets)

    def fake(self) -> Tensor:
        like, (heads, feat) = features_of(self.lhs, self.rhs)
        return like.new_empty((self.col.shape[-1], heads, 1 if self.op == "dot" else feat))

    def gradients(self, grad: Tensor) -> Gradients:
        lhs, rhs, op = self.lhs, self.rhs, self.op

        def for_lhs() -> Tensor:
            if op not in ("mul", "div", "dot"):
                return self._collected(grad, lhs, self.lhs_target)
            other = 1 / rhs if op == "div" and rhs is not None else rhs
            return self._collected(grad, lhs, self.lhs_target, other, self.rhs_target)

        def for_rhs() -> Tensor:
            assert rhs is not None
            if op not in ("mul", "div", "dot"):
                return self._collected(-grad if op == "sub" else grad, rhs, self.rhs_target)
            out = self._collected(grad, rhs, self.rhs_target, lhs, self.lhs_target)
            return -out / (rhs * rhs) if op == "div" else out

        return {"lhs": for_lhs, "rhs": for_rhs}

    def _collected(
        self,
        grad: Tensor,
        operand: Tensor | None,
        target: str,
        other: Tensor | None = None,
        other_target: str = "e",
    ) -> Tensor:
        """Sum, at the operand's nodes or edges, the edges' gradients times the other operand."""
        assert operand is not None
        rowptr, col, n = self.rowptr, self.col, self.n
        if target != "e" and other is not None and other_target not in ("e", target):
            sums = gspmm(rowptr, col, other, grad, n, "mul", "sum", target == "u")
            return _summed_to(sums, operand).expand_as(operand)
        if other is not None and other_target == "e":
            grad = grad * other
        elif other is not None:
            grad = gsddmm(rowptr, col, grad, other, n, "mul", "e", other_target)
        # In a dot product, an operand broadcast over features has one gradient for all of them.
        grad = _summed_to(grad, operand)
        if target != "e":
            grad = gspmm(rowptr, col, None, grad, n, "copy_e", "sum", target == "u")
        return grad.expand_as(operand)


gsddmm = Operator("gsddmm", Gsddmm)


@dataclass
class SegmentSoftmax(Operation[Tensor]):
    """(batch, nnz, heads) softmax over the elements of each row."""

    rowptr: Tensor
    col: Tensor
    x: Tensor
    n: int
    keeps = (0,)
    unused = ("x",)

    def run(self) -> Tensor:
        structure = structure_of(self.rowptr, self.col, self.n, "sparse_softmax")
        return message_kernels.softmax(structure, self.x)

    def fake(self) -> Tensor:
        return self.x.new_empty(self.x.shape)

    def gradients(self, grad: Tensor) -> Gradients:
        rowptr, col, n = self.rowptr, self.col, self.n
        return {"x": lambda: segment_softmax_backward(rowptr, col, self.results, grad, n)}


segment_softmax = Operator("segment_softmax", SegmentSoftmax)


@dataclass
class SegmentSoftmaxBackward(Operation[Tensor]):
    """The gradient of a softmax y for its argument."""

    rowptr: Tensor
    col: Tensor
    y: Tensor
    grad: Tensor
    n: int

    def run(self) -> Tensor:
        structure = structure_of(self.rowptr, self.col, self.n)
        return message_kernels.softmax(structure, self.y, self.grad)

    def fake(self) -> Tensor:
        return self.y.new_empty(self.y.shape)

    def gradients(self, grad: Tensor) -> Gradients:
        rowptr, col, y, g, n = self.rowptr, self.col, self.y, self.grad, self.n

        def row_sums(x: Tensor) -> Tensor:
            """Sums over each element's row, (batch, nnz, heads)."""
            sums = gspmm(rowptr, col, None, x.transpose(0, 1), n, "copy_e", "sum", False)
            return gsddmm(rowptr, col, sums, None, n, "copy_lhs", "v", "e").transpose(0, 1)

        return {
            "y": lambda: grad * (g - row_sums(y * g)) - g * row_sums(y * grad),
            "grad": lambda: segment_softmax_backward(rowptr, col, y, grad, n),
        }


segment_softmax_backward = Operator("segment_softmax_backward", SegmentSoftmaxBackward)


@dataclass
class EdgeAttention(Operation[Tensor]):
    """(m, heads, width) attention of q (m, heads, feat) to k and v, along the elements."""

    rowptr: Tensor
    col: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float

    def run(self) -> Tensor:
        structure = structure_of(self.rowptr, self.col, self.k.shape[0], "attention")
        return message_kernels.attention(structure, self.q, self.k, self.v, self.scale)

    def fake(self) -> Tensor:
        return self.q.new_empty((*self.q.shape[:-1], self.v.shape[-1]))

    def gradients(self, grad: Tensor) -> Gradients:
        operands = self.q, self.k, self.v
        return attention_gradients(self.rowptr, self.col, *operands, grad, self.scale)


def attention_gradients(
    rowptr: Tensor, col: Tensor, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, scale: float
) -> Gradients:
    """Functions that compute the gradients of attention for q, k and v; differentiable."""
    n, dtype = k.shape[0], q.dtype
    # Weights are recomputed rather than kept, from scores that need more than 16 bits.
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v, grad = (x.to(wide) for x in (q, k, v, grad))
    scores = gsddmm(rowptr, col, k, q, n, "dot", "u", "v") * scale
    weights = segment_softmax(rowptr, col, scores.permute(2, 0, 1), n)

    @cache
    def score_gradient() -> Tensor:
        of_weights = gsddmm(rowptr, col, v, grad, n, "dot", "u", "v").permute(2, 0, 1)
        scores = segment_softmax_backward(rowptr, col, weights, of_weights, n)
        return scores.permute(1, 2, 0) * scale

    def summed(x: Tensor, by_edge: Callable[[], Tensor], back: bool) -> Callable[[], Tensor]:
        return lambda: gspmm(rowptr, col, x, by_edge(), n, "mul", "sum", back).to(dtype)

    return {
        "v": summed(grad, lambda: weights.permute(1, 2, 0), True),
        "q": summed(k, score_gradient, False),
        "k": summed(q, score_gradient, True),
    }


edge_attention = Operator("edge_attention", EdgeAttention)


def mean_gradient(grad: Tensor, elements: Tensor) -> Tensor:
    """The gradient for sums of rows, from that for their means.

    elements : number of elements of each row, broadcast with `grad`
    """
    # In float32 at least: float16 ends at 65504, and rows may have more elements.
    wide = torch.promote_types(grad.dtype, torch.float32)
    return (grad / elements.clamp(min=1).to(wide)).to(grad.dtype)


def as_messages(values: Tensor | None, b: Tensor) -> tuple[Tensor, Tensor | None, str]:
    """Operands u and e of a product in the form of messages, and the messages' name.

    values, b : (nnz,) or (heads, nnz), and (n, feat) or (heads, n, feat)
    """
    u, e = nodes_first(b), None if values is None else nodes_first(values[..., None])
    return u, e, "copy_u" if e is None else "mul"


def nodes_first(x: Tensor) -> Tensor:
    """Transpose (heads, rows, feat) to (rows, heads, feat), or (rows, feat) to (rows, 1, feat)."""
    return x.transpose(0, 1) if x.dim() == 3 else x[:, None]


def heads_first(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of :func:`nodes_first` for a tensor in the form of `like`."""
    return x.transpose(0, 1) if like.dim() == 3 else x[:, 0]


def gradients_of_product(
    col: Tensor, values: Tensor | None, b: Tensor, place: Tensor, grad: Tensor
) -> Gradients:
    """Functions that compute an extremum's gradients for values and b, by torch's operators.

    place, grad : with heads first, like b
    """
    u, e, op = as_messages(values, b)
    of_messages = gradients_of_messages(col, u, e, nodes_first(place), op, nodes_first(grad))
    return product_gradients(of_messages, b)


def product_gradients(of_messages: Gradients, b: Tensor) -> Gradients:
    """The gradients of a product for values and b, from those of its messages."""
    return {
        "values": lambda: heads_first(of_messages["e"](), b)[..., 0],
        "b": lambda: heads_first(of_messages["u"](), b),
    }


@dataclass
class MessageGradients(Operation[Tensor]):
    """(nnz, heads, feat) gradients of messages reduced in steps, given those of the results y."""

    rowptr: Tensor
    col: Tensor
    u: Tensor | None
    e: Tensor | None
    y: Tensor
    grad: Tensor
    n: int
    op: str
    reduce: str

    def run(self) -> Tensor:
        structure = structure_of(self.rowptr, self.col, self.n, "gspmm")
        operands = self.u, self.e, self.y, self.grad
        return message_kernels.message_gradients(structure, *operands, self.op, self.reduce)

    def fake(self) -> Tensor:
        return self.y.new_empty((self.col.shape[-1], *self.y.shape[1:]))


message_gradients = Operator("message_gradients", MessageGradients)


def gradients_in_steps(
    rowptr: Tensor, col: Tensor, u: Tensor | None, e: Tensor | None, n: int, op: str, reduce: str,
    y: Tensor, grad: Tensor,
) -> Gradients:  # fmt: skip
    """Functions that compute the gradients of messages reduced in steps to y, for u and e.

    Gradients of messages are stored, (nnz, heads, feat), in float32 at least.
    """
    dtype, steps = grad.dtype, REDUCERS[reduce].steps
    assert steps is not None
    grad = grad.to(torch.promote_types(dtype, torch.float32))
    u, e = (None if x is None else x.to(grad.dtype) for x in (u, e))
    (first, lhs), (second, rhs) = (("u", u), ("e", e))[:: -1 if op == "copy_e" else 1]
    kind = "copy_lhs" if op.startswith("copy") else op

    @cache
    def of_messages() -> Gradients:
        same = y.dtype == grad.dtype and not torch.is_grad_enabled()
        wide = y if same else gspmm(rowptr, col, u, e, n, op, reduce, False)
        wide = wide.masked_fill(wide == float("-inf"), 0)
        if not torch.is_grad_enabled():
            by_message = message_gradients(rowptr, col, u, e, wide, grad, n, op, reduce)
        else:  # in steps that have gradients
            terms = gsddmm(rowptr, col, lhs, rhs, n, kind, first, second)
            results = gsddmm(rowptr, col, wide, None, n, "copy_lhs", "v", "e")
            each = steps.gradient(torch, terms, results)
            by_message = gsddmm(rowptr, col, each, grad, n, "mul", "e", "v")
        return Gsddmm(rowptr, col, lhs, rhs, n, kind, first, second).gradients(by_message)

    return {
        first: lambda: of_messages()["lhs"]().to(dtype),
        second: lambda: of_messages()["rhs"]().to(dtype),
    }


def gradients_of_messages(
    col: Tensor, u: Tensor | None, e: Tensor | None, arg: Tensor, op: str, grad: Tensor
) -> Gradients:
    """Functions that compute the gradients of the greatest or least messages for u and e.

    u, e : (n, heads, feat) and (nnz, heads, feat), whose heads and feat may be 1
    arg : (m, heads, feat) the element that each comes from, -1 in empty rows

    Gradients go to that element alone; sums of 16-bit numbers are in float32.
    """
    columns = col[0] if col.dim() == 2 else col
    nothing = not columns.shape[0]
    has_edge, edge = arg >= 0, arg.clamp(min=0)
    column = edge if nothing else columns.long()[edge]
    with_both = op in ("mul", "div")

    def at(operand: Tensor, place: Tensor) -> Tensor:
        """Positions in an operand that may be broadcast over heads or features, (m * .. ,)."""
        (_, heads, feat), (_, h, k) = operand.shape, place.shape
        place = place * heads
        if heads != 1:
            place = place + torch.arange(h, device=place.device)[:, None]
        place = place * feat
        return (place + torch.arange(k, device=place.device) if feat != 1 else place).reshape(-1)

    def at_extrema(operand: Tensor, place: Tensor) -> Tensor:
        """The operand's values in the greatest or least messages."""
        return grad if nothing else operand.expand(-1, *place.shape[1:]).gather(0, place)

    def scattered(terms: Tensor, place: Tensor, operand: Tensor) -> Tensor:
        wide = torch.promote_types(terms.dtype, torch.float32)
        zeros = terms.new_zeros(operand.shape, dtype=wide)
        if not nothing:
            terms = torch.where(has_edge, terms, 0).to(wide)
            if operand.shape[1:] == place.shape[1:]:
                zeros = zeros.scatter_add(0, place, terms)
            else:
                flat = zeros.reshape(-1).scatter_add(0, at(operand, place), terms.reshape(-1))
                zeros = flat.view_as(operand)
        return zeros.to(operand.dtype)

    def for_u() -> Tensor:
        assert u is not None
        other = at_extrema(e, edge) if with_both and e is not None else None
        terms = grad if other is None else grad * other if op == "mul" else grad / other
        return scattered(terms, column, u)

    def for_e() -> Tensor:
        assert e is not None
        terms = -grad if op == "sub" else grad
        if with_both and u is not None:
            terms = grad * at_extrema(u, column)
            if op == "div":
                other = at_extrema(e, edge)
                terms = -terms / (other * other)
        return scattered(terms, edge, e)

    return {"u": for_u, "e": for_e}
