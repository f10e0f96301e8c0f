"""Calls of the kernels of messages, softmax and attention on torch tensors, without gradients.

Features are (nodes or nnz, heads, feat) here, where heads and feat may be 1 to be broadcast; edge
values are read and returned in the caller's order of a structure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsetir.ops.cache import cacheable
from sparsetir.ops.structure import Structure
from sparsetir.ops.tensors import DTYPES, launch, target_of
from sparsetir.planning.along_request import AlongEdges
from sparsetir.planning.plan import made_for
from sparsetir.planning.request import default_threads
from sparsetir.planning.run_plan import compiled_by
from sparsetir.runtime.arrays import dtype_name
from sparsetir.runtime.kernel import Kernel
from sparsetir.schedules.operators.edge_attention import EdgeAttention
from sparsetir.schedules.operators.edge_messages import EdgeMessages
from sparsetir.schedules.operators.edge_softmax import EdgeSoftmax
from sparsetir.schedules.operators.messages import Messages
from sparsetir.schedules.operators.problems import Problem
from sparsetir.schedules.operators.registry import ALONG

Named = dict[str, Tensor | float | None]


def gspmm(
    structure: Structure,
    u: Tensor | None,
    e: Tensor | None,
    op: str,
    reduce: str,
    arg: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(m, heads, feat) reduced messages; with `arg` also each one's element, -1 in empty rows."""
    like, (heads, feat) = features_of(u, e)
    dtype, shape = like.dtype, (structure.m, heads, feat)
    if 0 in shape or not structure.nnz:
        return like.new_zeros(shape), like.new_full(shape, -1, dtype=torch.int64) if arg else None
    if e is None and u is not None and heads > 1:  # heads are features, as none has its own value
        flat = u.expand(-1, heads, feat).reshape(len(u), 1, heads * feat)
        out, winners = gspmm(structure, flat, None, op, reduce, arg)
        return out.view(shape), winners if winners is None else winners.view(shape)
    if arg and dtype == torch.bfloat16 and u is not None and e is not None:  # see Messages
        out, winners = gspmm(structure, u.float(), e.float(), op, reduce, arg)
        return out.to(dtype), winners
    out = like.new_empty(shape)
    ordered = arg or (e is not None and structure.order is not None)
    named: Named = {"u": _squeezed(u), "e": _squeezed(e), "out": out}
    winners = out.new_empty(shape, dtype=_arrays_of(structure)["indptr"].dtype) if arg else None
    if ordered:
        named |= {"order": structure.derived(_order, _order), "arg_out": winners}
    dims = _dims(u), _dims(e)
    kind = op, reduce, *dims, *_types(structure, dtype), ordered, arg
    _run(structure, Messages, kind, (feat,), {"heads": heads, "feat": feat}, named)
    if winners is None:
        return out, None
    nowhere = torch.iinfo(winners.dtype).max
    winners = winners.long()
    return out, winners.masked_fill_(winners == nowhere, -1)


def message_gradients(
    structure: Structure, u: Tensor | None, e: Tensor | None, y: Tensor, grad: Tensor, op: str,
    reduce: str,
) -> Tensor:  # fmt: skip
    """(nnz, heads, feat) gradients of messages that :func:`gspmm` reduces in steps to y.

    grad : the gradient for y
    """
    like, (heads, feat) = features_of(u, e)
    out = like.new_empty((structure.nnz, heads, feat))
    if not out.numel():
        return out
    e = None if e is None else structure.arranged(e, 0)
    named: Named = {"u": _squeezed(u), "e": _squeezed(e), "y": y, "g": grad, "out": out}
    kind = op, reduce, _dims(u), _dims(e), *_types(structure, out.dtype), False, False, True
    _run(structure, Messages, kind, (feat,), {"heads": heads, "feat": feat}, named)
    return structure.restored(out, 0)


def gsddmm(
    structure: Structure, lhs: Tensor | None, rhs: Tensor | None, op: str, targets: tuple[str, str]
) -> Tensor:
    """(nnz, heads, feat) edge values from operands at sources "u", targets "v" or edges "e".

    For "dot" the result's feat is 1.
    """
    like, (heads, feat) = features_of(lhs, rhs)
    dot = op == "dot"
    shape = structure.nnz, heads, 1 if dot else feat
    if 0 in shape or not feat:
        return like.new_zeros(shape)
    out = like.new_empty(shape)
    at = ["edge" if target == "e" else "node" for target in targets]
    kind = op, _dims(lhs), _dims(rhs), *at, *_types(structure, out.dtype)
    named: Named = {"out": out.squeeze(-1) if dot else out}
    for side, operand, target in zip(("lhs", "rhs"), (lhs, rhs), targets, strict=True):
        named[side] = _squeezed(operand)
        if operand is not None and target != "e":
            ends = structure.derived(_ends, _ends)
            named |= {f"{side}_of": ends[target], f"{side}_nodes": len(operand)}
    _run(structure, EdgeMessages, kind, (feat,), {"heads": heads, "feat": feat}, named)
    return out


def softmax(structure: Structure, x: Tensor, grad: Tensor | None = None) -> Tensor:
    """(batch, nnz, heads) softmax within each row of x, which has that shape.

    grad : if passed, x is a softmax and this its gradient: return that for the softmax's argument
    """
    if not x.numel():
        return torch.zeros_like(x)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    batch, _, heads = x.shape
    out = x.new_empty(x.shape, dtype=wide)
    moved = [None if y is None else structure.arranged(y.to(wide), 1) for y in (x, grad)]
    flat = [None if y is None else y.reshape(-1, heads) for y in (*moved, out)]
    named: Named = dict(zip(("x", "g", "out"), flat, strict=True))
    kind = *_types(structure, wide), grad is not None
    _run(structure, EdgeSoftmax, kind, (heads,), {"batch": batch, "heads": heads}, named)
    return structure.restored(out, 1).to(x.dtype)


def attention(
    structure: Structure, q: Tensor, k: Tensor, v: Tensor, scale: float, heads_first: bool = False
) -> Tensor:
    """(m, heads, width) sums of v (n, heads, width), weighted by the softmax of scale * q . k.

    q, k : (m, heads, feat) and (n, heads, feat)
    heads_first : whether operands and the result have heads before m or n
    """
    heads, feat, width = q.shape[0 if heads_first else 1], q.shape[-1], v.shape[-1]
    shape = *q.shape[:-1], width
    if 0 in shape or not structure.nnz:
        return v.new_zeros(shape)
    if not feat:  # all scores are zero
        q, k = q.new_zeros(*q.shape[:-1], 1), k.new_zeros(*k.shape[:-1], 1)
        feat = 1
    out, wide = v.new_empty(shape), torch.promote_types(q.dtype, torch.float32)
    scores = q.new_empty((heads, structure.nnz), dtype=wide)
    named: Named = {"q": q, "k": k, "v": v, "out": out, "scores": scores, "scale": scale}
    sizes = {"heads": heads, "feat": feat, "width": width}
    kind = *_types(structure, q.dtype), heads_first
    _run(structure, EdgeAttention, kind, (feat, width), sizes, named)
    return out


# -- one run of a kernel --------------------------------------------------------------------------


def _run(
    structure: Structure,
    problem: Callable[..., Problem],
    kind: tuple[object, ...],
    features: tuple[int, ...],
    sizes: dict[str, int],
    named: Named,
) -> None:
    """Run the kernel with the config recorded for the pattern, or chosen by sizes.

    problem, kind : the class of its problem, and the problem's fields
    features, sizes : see :class:`sparsetir.planning.request.Request`
    """

    def made(of: Structure) -> Kernel:
        on = default_threads(), target_of(of.device)
        sized = problem(*kind), features, sizes, {}, ()
        wanted = AlongEdges(ALONG["messages"], "messages", of.pattern, *sized, *on)
        make = lambda config, _: compiled_by(config, wanted.problem, wanted.target)  # noqa: E731
        recorded = problem is not EdgeMessages and not wanted.gpu
        return made_for(wanted, make, (lambda: of.pattern.in_order) if recorded else None)

    at = problem, *kind, *features, *sizes.values(), default_threads()
    kernel = structure.derived(at, made)
    launch(kernel, {**_arrays_of(structure), **sizes, **named})


def _arrays_of(structure: Structure) -> dict[str, Any]:
    """Arrays and sizes of the pattern, by the names of parameters, and the type of its arrays."""
    return structure.derived(_arrays, _arrays)


def _types(structure: Structure, dtype: torch.dtype) -> tuple[str, str]:
    return DTYPES[dtype], _arrays_of(structure)["idtype"]


@cacheable
def _arrays(structure: Structure) -> dict[str, Any]:
    indptr, indices = (torch.from_numpy(x).to(structure.device) for x in structure.pattern[:2])
    sizes = {"m": structure.m, "n": structure.n, "nnz": structure.nnz}
    return {"indptr": indptr, "indices": indices, "idtype": dtype_name(indptr), **sizes}


@cacheable
def _order(structure: Structure) -> Tensor:
    """(nnz,) position of each element in the caller's order."""
    like = _arrays_of(structure)["indices"]
    if structure.order is None:
        return torch.arange(len(like), dtype=like.dtype, device=like.device)
    return structure.order.to(like.dtype)


@cacheable
def _ends(structure: Structure) -> dict[str, Tensor]:
    """(nnz,) source "u" and target "v" of each element, in the caller's order."""
    arrays = _arrays_of(structure)
    rows = torch.repeat_interleave(arrays["indptr"].diff()).to(arrays["indptr"].dtype)
    return {"u": structure.restored(arrays["indices"]), "v": structure.restored(rows)}


def features_of(*operands: Tensor | None) -> tuple[Tensor, tuple[int, int]]:
    """One of the operands, and the (heads, feat) that all broadcast to."""
    present = [x for x in operands if x is not None]
    heads, feat = broadcast(*(x.shape[1:] for x in present))
    return present[0], (heads, feat)


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The broadcast shape of shapes of equal rank; RuntimeError if they do not fit.

    torch.broadcast_shapes takes a third of the time of a small message.
    """
    out = tuple(next((s for s in sizes if s != 1), 1) for sizes in zip(*shapes, strict=True))
    if any(s not in (1, size) for x in shapes for s, size in zip(x, out, strict=True)):
        raise RuntimeError(f"expected shapes to be broadcast, got {shapes}")
    return out


def _dims(x: Tensor | None) -> str:
    """The letters by which kernels name an operand's dimensions."""
    if x is None:
        return ""
    return "h" * (x.shape[1] != 1) + "f" * (x.shape[2] != 1)


def _squeezed(x: Tensor | None) -> Tensor | None:
    """Drop x's dimensions of size 1."""
    if x is None:
        return None
    return x.reshape(x.shape[0], *(s for s in x.shape[1:] if s != 1))
