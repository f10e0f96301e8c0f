"""Messages along edges, their reduction, softmax over edges and attention, with gradients.

Rows of a matrix are targets ("v" in DGL's names) and its columns are sources ("u").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from sparsetir.ops import messages_library, products
from sparsetir.ops.cache import cached_result, kept, private
from sparsetir.ops.message_kernels import broadcast
from sparsetir.ops.operands import Operand, resolve
from sparsetir.ops.registry import holds_data, wants_gradient
from sparsetir.ops.structure import PatternCopy, Structure, structure_of
from sparsetir.ops.tensors import check_rows, check_strided, check_tensor, scale_of
from sparsetir.planning.request import message, reduction
from sparsetir.reductions import EXTREMA
from sparsetir.runtime.refusals import wrong
from sparsetir.schedules.operators.names import BINARY

TARGETS = ("u", "v", "e")
EDGE_OPS = ("copy_lhs", "copy_rhs", *BINARY, "dot")
T = TypeVar("T")


def gspmm(
    A: object,
    op: str,
    reduce: str | None = None,
    u: Tensor | None = None,
    e: Tensor | None = None,
    *,
    reduce_op: str | None = None,
    lhs_data: Tensor | None = None,
    rhs_data: Tensor | None = None,
) -> Tensor:
    """Out[i] = reduce over the elements (i, j) of op(u[j], e[(i, j)]).

    Parameters
    ----------
    A : sparse (m, n) matrix
        Any kind that :func:`resolve` accepts.
    op : str
        "copy_u", "copy_e", "u_add_e", "u_sub_e", "u_mul_e" or "u_div_e"; or DGL's "copy_lhs",
        "copy_rhs", "add", "sub", "mul" and "div"; or with the reduction, as "u_mul_e_sum".
    reduce : str
        "sum" or "add" (by default), "mean" (the sum over the number of elements of the row), "max"
        or "amax", "min" or "amin", or "logsumexp", whose gradient stores those of messages. A row
        without elements gives zero; NaN is both the greatest and the least.
    u : (n, ...) Tensor
        Features of sources.
    e : (nnz, ...) Tensor
        Features of edges, in the order of A's elements; by default A's values. Feature dimensions
        of u and e are broadcast as by torch, except (nnz,), which is one number for all features:
        (n, heads, f) fits (nnz, heads, 1), and (n, f) fits (nnz, f), (nnz, 1) and (nnz,).
    reduce_op, lhs_data, rhs_data
        DGL's names for reduce, u and e.

    Returns
    -------
    (m, ...) Tensor
        Differentiable with respect to u and e any number of times; the gradient of a maximum goes
        to one element that has it.

    Raises
    ------
    TypeError, ValueError
        For an invalid argument, which the message names.

    Notes
    -----
    Sums are in float32, or float64 for float64. (SparseTIR, section 4.2.1.)
    """
    reduce = _either("gspmm", "reduce", reduce, "reduce_op", reduce_op)
    u = _either("gspmm", "u", u, "lhs_data", lhs_data)
    e = _either("gspmm", "e", e, "rhs_data", rhs_data)
    kind, reduce = message("gspmm", op, reduce)
    u = None if kind == "copy_e" else _given("gspmm", "u", u, f"'{op}'")
    square = None if u is None else (u.shape[0], u.shape[0])
    operand = resolve(A, None, square, "gspmm")
    if kind == "copy_u":
        e = None
    elif e is None:
        e = _own_values(operand, u)
    if kind != "copy_u":
        e = _given("gspmm", "e", e, f"'{op}' of a matrix without values")
    _check_like("gspmm", operand, u=(u, operand.n, "columns"), e=(e, _count(operand), "elements"))
    shapes = _merged("gspmm", "u", u, "e", e)
    u3, e3 = shapes.grouped(u, 0), shapes.grouped(e, 1)
    if e3 is None or (kind == "mul" and e3.shape[1:].numel() == 1):
        assert u3 is not None
        values = None if e3 is None else e3.reshape(-1)
        out = products.spmm(operand._replace(values=values), u3.flatten(1), reduce)
    else:
        out = _reduced(operand, u3, e3, kind, reduce)
    return out.reshape(operand.m, *shapes.out)


def segment_reduce(values: Tensor, rowptr: Tensor, reduce: str = "sum") -> Tensor:
    """Out[i] = reduce over p from rowptr[i] up to rowptr[i + 1] of values[p].

    Parameters
    ----------
    values : (nnz, ...) Tensor
        The values to reduce.
    rowptr : (m + 1,) Tensor, int32 or int64
        Non-decreasing from 0 to nnz.
    reduce : str
        As for :func:`gspmm`.

    Returns
    -------
    (m, ...) Tensor
        Differentiable any number of times.
    """
    values = _given("segment_reduce", "values", values, "segments")
    reduce = reduction("segment_reduce", reduce)
    check_strided("segment_reduce", "rowptr", rowptr)
    if rowptr.dim() != 1 or not rowptr.shape[0]:
        raise wrong("segment_reduce", "rowptr", "shape (m + 1,)", tuple(rowptr.shape))
    operand = _segments(rowptr, values.shape[0])
    _check_like("segment_reduce", operand, values=(values, values.shape[0], "elements"))
    shapes = _merged("segment_reduce", "values", values, "values", None)
    out = _reduced(operand, None, shapes.grouped(values, 0), "copy_e", reduce)
    return out.reshape(operand.m, *shapes.out)


def gsddmm(
    A: object, op: str, lhs: Tensor | None = None, rhs: Tensor | None = None,
    lhs_target: str = "u", rhs_target: str = "v", *,
    lhs_data: Tensor | None = None, rhs_data: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Out[e] = op(lhs[e], rhs[e]) for each element e of A, from features of its ends or its own.

    Parameters
    ----------
    A : sparse (m, n) matrix
        Any kind that :func:`resolve` accepts; its values are ignored.
    op : str
        "add", "sub", "mul", "div", "dot" (the sum of products over the last dimension, which stays
        with size 1), "copy_lhs" or "copy_rhs"; or both targets in one name, as "u_add_v",
        "u_dot_v", "v_mul_e", "copy_u".
    lhs, rhs : Tensor
        (n, ...) for target "u", the sources; (m, ...) for "v", the targets; (nnz, ...) for "e", the
        elements in A's order. Feature dimensions are broadcast as by torch, except for operands
        without any, which are one number for all features.
    lhs_target, rhs_target : {"u", "v", "e"}
        What the operands are features of.
    lhs_data, rhs_data : Tensor
        DGL's names for lhs and rhs.

    Returns
    -------
    (nnz, ...) Tensor
        Differentiable with respect to lhs and rhs any number of times.

    Raises
    ------
    TypeError, ValueError
        For an invalid argument, which the message names.

    Notes
    -----
    Sums are in float32, or float64 for float64. (SparseTIR, section 4.2.2.)
    """
    lhs = _either("gsddmm", "lhs", lhs, "lhs_data", lhs_data)
    rhs = _either("gsddmm", "rhs", rhs, "rhs_data", rhs_data)
    op, lhs_target, rhs_target = _edge_op(op, lhs_target, rhs_target)
    copied = "rhs" if op == "copy_rhs" else "lhs"  # the caller's name
    if op == "copy_rhs":
        op, lhs, lhs_target = "copy_lhs", rhs, rhs_target
        lhs = _given("gsddmm", "rhs", lhs, "a copy of it")
    lhs = _given("gsddmm", "lhs", lhs, f"'{op}'")
    rhs = None if op == "copy_lhs" else _given("gsddmm", "rhs", rhs, f"'{op}'")
    operand = resolve(A, None, _shape_by(lhs, lhs_target, rhs, rhs_target), "gsddmm")
    rows = {"u": (operand.n, "columns"), "v": (operand.m, "rows")}
    rows["e"] = (_count(operand), "elements")
    sides = {copied: (lhs, *rows[lhs_target])}
    if rhs is not None:
        sides["rhs"] = rhs, *rows[rhs_target]
    _check_like("gsddmm", operand, **sides)
    if op == "dot" and rhs is not None:
        return _dot(operand, lhs, rhs, lhs_target, rhs_target)
    shapes = _merged("gsddmm", "lhs", lhs, "rhs", rhs)
    sides3 = shapes.grouped(lhs, 0), shapes.grouped(rhs, 1)
    pattern, targets = (operand.rowptr, operand.col), (lhs_target, rhs_target)
    out = messages_library.gsddmm(*pattern, *sides3, operand.n, op, *targets)
    return out.reshape(out.shape[0], *shapes.out)


def sparse_softmax(A: object, values: Tensor | None = None) -> Tensor:
    """Softmax over the elements of each row of A.

    Parameters
    ----------
    A : sparse (m, n) matrix
        Any kind that :func:`resolve` accepts.
    values : (nnz,) or (nnz, heads) Tensor, optional
        Values in the order of A's elements; by default A's own.

    Returns
    -------
    (nnz,) or (nnz, heads) Tensor
        Differentiable any number of times.

    Notes
    -----
    Exponentials and sums are in float32, for float64 in float64. (SparseTIR, section 3.4.)
    """
    operand = resolve(A, values, None, "sparse_softmax")
    x = _given("sparse_softmax", "values", operand.values, "a matrix without values")
    nnz = _count(operand)
    if x.dim() not in (1, 2) or x.shape[0] != nnz:
        raise wrong("sparse_softmax", "values", f"shape ({nnz},) or ({nnz}, heads)", tuple(x.shape))
    _check_like("sparse_softmax", operand, values=(x, nnz, "elements"))
    return _softmax(operand, x.reshape(1, nnz, x.shape[1:].numel())).reshape(x.shape)


def softmax_by_heads(operand: Operand, x: Tensor) -> Tensor:
    """:func:`sparse_softmax` of (nnz,) or (heads, nnz) values, the form of layers."""
    return _softmax(operand, x.reshape(x.shape[:-1].numel(), x.shape[-1], 1)).reshape(x.shape)


def edge_softmax(A: object, e: Tensor, norm_by: str = "dst") -> Tensor:
    """Softmax over the edges into each target: over the elements of each row of A.

    Like :func:`sparse_softmax`, for features with any number of dimensions.

    Parameters
    ----------
    A : sparse (m, n) matrix
        Any kind that :func:`resolve` accepts.
    e : (nnz,) or (nnz, heads, ...) Tensor
        Features in the order of A's elements; a softmax for each.
    norm_by : {"dst", "src"}
        "src" normalises over the edges out of each source, the elements of a column, as in DGL.

    Returns
    -------
    Tensor
        Of e's shape.
    """
    e = _given("edge_softmax", "e", e, "edges")
    if norm_by not in ("dst", "src"):
        raise wrong("edge_softmax", "norm_by", "'dst' or 'src'", f"{norm_by!r}")
    operand = resolve(A, None, None, "edge_softmax")
    if norm_by == "src":
        operand = _transposed(operand)
    nnz = _count(operand)
    _check_like("edge_softmax", operand, e=(e, nnz, "elements"))
    heads = e.shape[1:].numel()
    return _softmax(operand, e.reshape(1, nnz, heads)).reshape(e.shape)


def attention(A: object, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Out[i] = sum over the stored j of softmax(scale * q[i] . k[j]) * v[j], in one kernel.

    Parameters
    ----------
    A : sparse (m, n) matrix
        Any kind that :func:`resolve` accepts; its values are ignored.
    q : (m, feat) or (m, heads, feat) Tensor
        Queries, of the rows.
    k : (n, feat) or (n, heads, feat) Tensor
        Keys, of the columns.
    v : (n, width) or (n, heads, width) Tensor
        Values, of the columns.
    scale : float, optional
        The factor of scores; by default 1 / sqrt(feat).

    Returns
    -------
    (m, width) or (m, heads, width) Tensor
        A row without elements gives zeros. Differentiable with respect to q, k and v any number of
        times.

    Notes
    -----
    Scores are not stored for the backward pass, which recomputes them. (SparseTIR, section 4.3.1.)
    """
    named = {"q": q, "k": k, "v": v}
    for name, x in named.items():
        _given("attention", name, x, "attention")
        if x.dim() not in (2, 3) or x.shape[1:-1] != q.shape[1:-1]:
            raise ValueError(
                f"attention: argument '{name}': expected 2 dimensions, or 3 with as many heads as "
                f"'q', got shape {tuple(x.shape)} with 'q' of {tuple(q.shape)}"
            )
    if k.shape[-1] != q.shape[-1]:
        raise wrong("attention", "k", f"{q.shape[-1]} features as 'q'", k.shape[-1])
    operand = resolve(A, None, (q.shape[0], k.shape[0]), "attention")
    _check_like(
        "attention",
        operand,
        q=(q, operand.m, "rows"),
        k=(k, operand.n, "columns"),
        v=(v, operand.n, "columns"),
    )
    scale = scale_of("attention", scale, q.shape[-1])
    if q.dim() == 2:
        q, k, v = (x.unsqueeze(1) for x in (q, k, v))
    out = messages_library.edge_attention(operand.rowptr, operand.col, q, k, v, scale)
    return out if named["q"].dim() == 3 else out.squeeze(1)


def _either(caller: str, name: str, first: T | None, other: str, value: T | None) -> T | None:
    """An argument that has two names."""
    if first is not None and value is not None:
        raise TypeError(
            f"{caller}: argument '{other}': expected none with '{name}', which is the same"
        )
    return first if value is None else value


# -- calls of operators ---------------------------------------------------------------------------


def _reduced(operand: Operand, u: Tensor | None, e: Tensor | None, op: str, reduce: str) -> Tensor:
    rowptr, col, _, n, _ = operand
    if reduce in EXTREMA and wants_gradient(u, e):
        return messages_library.gspmm_arg(rowptr, col, u, e, n, op, reduce)[0]
    return messages_library.gspmm(rowptr, col, u, e, n, op, reduce, False)


def _dot(operand: Operand, lhs: Tensor, rhs: Tensor, lhs_target: str, rhs_target: str) -> Tensor:
    # An operand without feature dimensions gets one.
    lhs, rhs = (x.unsqueeze(-1) if x.dim() == 1 else x for x in (lhs, rhs))
    if lhs.dim() == 2 and rhs.dim() == 2 and lhs.shape[1] == rhs.shape[1]:
        ends = {lhs_target: lhs, rhs_target: rhs}
        if set(ends) == {"u", "v"}:
            return products.sddmm(operand, ends["v"], ends["u"]).unsqueeze(-1)
    feats = {lhs.shape[-1], rhs.shape[-1]} - {1}
    if len(feats) > 1:
        expected = "a last dimension to fit that of 'lhs'"
        raise wrong("gsddmm", "rhs", expected, f"shapes {tuple(lhs.shape)} and {tuple(rhs.shape)}")
    # Only heads are merged, as the last dimension is summed over.
    heads = _merged("gsddmm", "lhs", lhs, "rhs", rhs, most=1, keep=1)
    left, right = heads.grouped(lhs, 0, keep=1), heads.grouped(rhs, 1, keep=1)
    out = messages_library.gsddmm(
        operand.rowptr, operand.col, left, right, operand.n, "dot", lhs_target, rhs_target
    )
    return out.reshape(out.shape[0], *heads.out, 1)


def _softmax(operand: Operand, x: Tensor) -> Tensor:
    return messages_library.segment_softmax(operand.rowptr, operand.col, x, operand.n)


# -- arguments ------------------------------------------------------------------------------------


def _edge_op(op: str, lhs_target: str, rhs_target: str) -> tuple[str, str, str]:
    """The member of `EDGE_OPS`, and both sides' targets, which the name may contain."""
    parts = op.split("_") if isinstance(op, str) else []
    if len(parts) == 2 and parts[0] == "copy" and parts[1] in TARGETS:
        return "copy_lhs", parts[1], rhs_target
    if len(parts) == 3 and parts[0] in TARGETS and parts[2] in TARGETS:
        lhs_target, op, rhs_target = parts
    if op not in EDGE_OPS:
        expected = f"one of {', '.join(EDGE_OPS)}, or a name such as 'u_add_v' or 'copy_u'"
        raise wrong("gsddmm", "op", expected, f"{op!r}")
    for name, target in (("lhs_target", lhs_target), ("rhs_target", rhs_target)):
        if target not in TARGETS:
            raise wrong("gsddmm", name, f"one of {', '.join(TARGETS)}", f"{target!r}")
    return op, lhs_target, rhs_target


def _count(operand: Operand) -> int:
    return operand.col.shape[-1]


def _given(caller: str, name: str, x: object, what: str) -> Tensor:
    x = check_strided(caller, name, x, f"a tensor for {what}")
    if x.dim() < 1:
        raise wrong(caller, name, "1 or more dimensions", "a number")
    return x


def _check_like(caller: str, operand: Operand, **operands: tuple[Tensor | None, int, str]) -> None:
    """Raise unless operands, (tensor, rows, what rows are), fit the pattern and each other."""
    first = None
    for name, (x, rows, what) in operands.items():
        if x is not None:
            check_tensor(caller, name, x, first)
            said = f"for the {what} of the sparse matrix"
            check_rows(caller, name, x, operand.col.device, rows, said)
            first = x if first is None else first


def _merged(
    caller: str,
    first: str,
    a: Tensor | None,
    second: str,
    b: Tensor | None,
    most: int = 2,
    keep: int = 0,
) -> Merged:
    """Merge the feature dimensions of operands, except the last `keep`."""
    shapes = [None if x is None else tuple(x.shape[1 : x.dim() - keep]) for x in (a, b)]
    try:
        return merged(*shapes, most=most)
    except RuntimeError:
        expected = f"features to be broadcast with those of '{first}'"
        raise wrong(caller, second, expected, f"shapes {shapes[1]} and {shapes[0]}") from None


def _own_values(operand: Operand, u: Tensor | None) -> Tensor | None:
    values = operand.values
    if values is None or u is None or values.requires_grad:
        return values
    return values.to(u.device, u.dtype)


def _transposed(operand: Operand) -> Operand:
    """The transposed matrix without values, whose elements are in the same order."""
    rowptr, col, m, n, _ = operand

    def make() -> Tensor:
        if col.dim() == 2:
            return col.flip(0)
        rows = torch.arange(m, dtype=col.dtype, device=col.device)
        return torch.stack([torch.repeat_interleave(rows, rowptr[1:] - rowptr[:-1]), col])

    if torch.compiler.is_compiling() or not holds_data(rowptr, col):
        return resolve((make(), (m, n)), None, None, "edge_softmax")

    def turned(_: Structure) -> PatternCopy:
        edges = private(make(), is_new=True)
        return cached_result(PatternCopy.from_edges, "edge_softmax", edges, n, m)

    by_source = structure_of(rowptr, col, n).derived("turned", turned)
    return Operand(by_source.rowptr, by_source.col, n, m)


def _segments(rowptr: Tensor, nnz: int) -> Operand:
    """The elements of segments, all in one column."""
    m = rowptr.shape[0] - 1
    if torch.compiler.is_compiling() or not holds_data(rowptr):
        return Operand(rowptr, torch.zeros(nnz, dtype=rowptr.dtype, device=rowptr.device), m, 1)

    def make(rowptr: Tensor) -> PatternCopy:
        zeros = torch.zeros(nnz, dtype=rowptr.dtype, device=rowptr.device)
        return PatternCopy.from_csr("segment_reduce", rowptr, private(zeros, is_new=True), 1)

    pattern = kept.get(("segments", nnz), make, rowptr)
    return Operand(pattern.rowptr, pattern.col, m, 1)


def _shape_by(
    lhs: Tensor, lhs_target: str, rhs: Tensor | None, rhs_target: str
) -> tuple[int, int] | None:
    """(m, n) from the operands, for edges without a size; square if one is unknown."""
    known = {lhs_target: lhs.shape[0]}
    if rhs is not None:
        known.setdefault(rhs_target, rhs.shape[0])
    m, n = known.get("v", known.get("u")), known.get("u", known.get("v"))
    return None if m is None or n is None else (m, n)


# -- feature dimensions of two operands, joined to heads and features for kernels -----------------


class Merged(NamedTuple):
    """Feature dimensions of operands, joined for a kernel.

    out : the feature dimensions of the result, as broadcast by torch
    groups : for each operand, the sizes of the joined dimensions; 1 where it is broadcast
    wide : whether operands must be expanded to `out` first
    """

    out: tuple[int, ...]
    groups: tuple[tuple[int, ...], tuple[int, ...]]
    wide: bool

    def grouped(self, x: Tensor | None, side: int, keep: int = 0) -> Tensor | None:
        """Reshape an operand to (rows, heads, feat), but keep its last `keep` dimensions.

        side : 0 for the first operand, 1 for the second
        """
        if x is None:
            return None
        kept = x.shape[x.dim() - keep :]
        if self.wide:
            before = x.shape[1 : x.dim() - keep]
            ones = (1,) * (len(self.out) - len(before))
            x = x.reshape(x.shape[0], *ones, *before, *kept)
            x = x.expand(x.shape[0], *self.out, *kept)
        return x.reshape(x.shape[0], *self.groups[side], *kept)


def merged(first: Sequence[int] | None, second: Sequence[int] | None, most: int = 2) -> Merged:
    """Join neighbouring dimensions that the same operands have.

    first, second : feature shapes; () for one number for all features, None for a missing operand
    most : maximum number of joined dimensions; with more, operands must be expanded

    >>> merged((4, 8), (4, 1)).groups
    ((4, 8), (4, 1))
    >>> merged((4, 8), (4, 8)).groups
    ((1, 32), (1, 32))

    Raises RuntimeError for shapes that cannot be broadcast.
    """
    a, b = (() if x is None else tuple(x) for x in (first, second))
    dims = max(len(a), len(b))
    a, b = ((1,) * (dims - len(x)) + x for x in (a, b))
    out = broadcast(a, b)
    if first is None or second is None:
        a = b = out  # join all dimensions of a single operand
    sizes: list[list[int]] = []
    last = None
    for one, other, size in zip(a, b, out, strict=True):
        if size == 1:
            continue
        has = one == size, other == size
        if has == last:
            sizes[-1] = [sizes[-1][0] * one, sizes[-1][1] * other]
        else:
            sizes.append([one, other])
        last = has
    wide = len(sizes) > most
    if wide:
        total = torch.Size(out).numel()
        sizes = [[total, total]]
    sizes = [[1, 1]] * (most - len(sizes)) + sizes
    groups = tuple(s[0] for s in sizes), tuple(s[1] for s in sizes)
    return Merged(out, groups, wide)
