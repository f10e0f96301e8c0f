"""Runs the kernels of messages, softmax and attention on torch tensors, without gradients.

Features are (nodes or nnz, heads, feat) here, where heads and feat may be 1 to be the same for all;
values of edges come and go in the caller's order of a structure.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from sparsetir.ops.cache import lasting
from sparsetir.ops.structure import Structure
from sparsetir.ops.tensors import DTYPES, launch, target_of
from sparsetir.planning.along_request import of_edges
from sparsetir.planning.plan import made_for
from sparsetir.planning.run_plan import compiled_by
from sparsetir.runtime.arrays import dtype_name
from sparsetir.runtime.kernel import Kernel
from sparsetir.schedules.operators.edge_attention import EdgeAttention
from sparsetir.schedules.operators.edge_messages import EdgeMessages
from sparsetir.schedules.operators.edge_softmax import EdgeSoftmax
from sparsetir.schedules.operators.messages import Messages
from sparsetir.schedules.operators.problems import Problem

Named = dict[str, Tensor | float | None]


def gspmm(
    structure: Structure,
    u: Tensor | None,
    e: Tensor | None,
    op: str,
    reduce: str,
    arg: bool = False,
    found: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(m, heads, feat) reduced messages; with `arg` also whose each is, -1 in empty rows.

    found : the reduced messages, where they are known
    """
    like, (heads, feat) = features_of(u, e)
    dtype = like.dtype
    of_product = arg and u is not None and (e is None or (op == "mul" and e.shape[2] == 1))
    narrow = dtype == torch.bfloat16 and u is not None and e is not None  # see Messages
    if arg and (narrow or (of_product and dtype.itemsize == 2)):
        wide_u, wide_e = (None if x is None else x.float() for x in (u, e))
        out, winners = gspmm(structure, wide_u, wide_e, op, reduce, arg)
        return out.to(dtype), winners
    if of_product and found is None and u is not None:
        found, reduce = _product(structure, u, e, reduce), "max"  # of what is given any will do
    out = like.new_zeros(structure.m, heads, feat) if found is None else found
    winners = torch.full(out.shape, -1, dtype=torch.int64, device=out.device) if arg else None
    if not out.numel() or not structure.nnz:
        return out, winners
    arrays = _arrays_of(structure)
    ordered = arg or (e is not None and structure.order is not None)
    types, given_too = (DTYPES[dtype], arrays.idtype), found is not None
    problem = Messages(op, reduce, _dims(u), _dims(e), *types, ordered, arg, given_too)
    named: Named = {
        "u": _squeezed(u),
        "e": _squeezed(e),
        "out": out,
        "order": arrays.order,
        "indptr": arrays.indptr,
        "indices": arrays.indices,
    }
    if arg:
        winners = torch.empty(out.shape, dtype=arrays.indptr.dtype, device=out.device)
        named["arg_out"] = winners
    _run(structure, problem, (feat,), {"heads": heads, "feat": feat}, named)
    if winners is None:
        return out, None
    nowhere = torch.iinfo(winners.dtype).max
    winners = winners.long()
    return out, winners.masked_fill_(winners == nowhere, -1)


def _product(structure: Structure, u: Tensor, e: Tensor | None, reduce: str) -> Tensor:
    """(m, heads, feat) reduced products with one number for all features, or with ones."""
    if e is None or e.shape[1] == 1:
        values = None if e is None else e.reshape(-1)
        return structure.run("spmm", (u.flatten(1),), values, reduce).unflatten(1, u.shape[1:])
    b = u.expand(-1, e.shape[1], -1).transpose(0, 1)
    return structure.run("spmm", (b,), e[..., 0].t(), reduce).transpose(0, 1).contiguous()


def gsddmm(
    structure: Structure, lhs: Tensor | None, rhs: Tensor | None, op: str, targets: tuple[str, str]
) -> Tensor:
    """(nnz, heads, feat) values of edges, of operands at their sources "u", targets "v" or "e".

    For "dot" feat of the result is 1.
    """
    like, (heads, feat) = features_of(lhs, rhs)
    dot = op == "dot"
    out = like.new_zeros(structure.nnz, heads, 1 if dot else feat)
    if not out.numel() or not feat:
        return out
    arrays = _arrays_of(structure)
    at = ["edge" if target == "e" else "node" for target in targets]
    types = DTYPES[out.dtype], arrays.idtype
    problem = EdgeMessages(op, _dims(lhs), _dims(rhs), at[0], at[1], *types)
    named: Named = {"out": out.squeeze(-1) if dot else out}
    for side, operand, target in zip(("lhs", "rhs"), (lhs, rhs), targets, strict=True):
        named[side] = _squeezed(operand)
        if operand is not None and target != "e":
            named |= {f"{side}_of": arrays.ends[target], f"{side}_nodes": len(operand)}
    _run(structure, problem, (feat,), {"heads": heads, "feat": feat}, named)
    return out


def softmax(structure: Structure, x: Tensor) -> Tensor:
    """(batch, nnz, heads) softmax of each row, of x of that shape."""
    return _softmax(structure, (x,), False)


def softmax_backward(structure: Structure, y: Tensor, grad: Tensor) -> Tensor:
    """The gradient of :func:`softmax` for x, of its result y."""
    return _softmax(structure, (y, grad), True)


def _softmax(structure: Structure, given: tuple[Tensor, ...], backward: bool) -> Tensor:
    first = given[0]
    if not first.numel():
        return torch.zeros_like(first)
    wide = torch.float64 if first.dtype == torch.float64 else torch.float32
    moved = [structure.arranged(x.to(wide), 1) for x in given]
    batch, _, heads = first.shape
    out = torch.empty(first.shape, dtype=wide, device=first.device)
    arrays = _arrays_of(structure)
    problem = EdgeSoftmax(DTYPES[wide], arrays.idtype, backward)
    names = ("y", "g", "dx") if backward else ("x", "out")
    flat = [x.reshape(-1, heads) for x in (*moved, out)]
    named: Named = {**dict(zip(names, flat, strict=True)), "indptr": arrays.indptr}
    _run(structure, problem, (heads,), {"batch": batch, "heads": heads}, named)
    return structure.restored(out, 1).to(first.dtype)


def attention(
    structure: Structure, q: Tensor, k: Tensor, v: Tensor, scale: float, heads_first: bool = False
) -> Tensor:
    """(m, heads, width) sums of v (n, heads, width), weighted by the softmax of scale * q . k.

    q, k : (m, heads, feat) and (n, heads, feat)
    heads_first : all of them, and the result, have heads before m or n
    """
    heads, feat, width = q.shape[0 if heads_first else 1], q.shape[-1], v.shape[-1]
    out = v.new_zeros(*q.shape[:-1], width)
    if not out.numel() or not structure.nnz:
        return out
    if not feat:  # all scores are zero
        q, k = q.new_zeros(*q.shape[:-1], 1), k.new_zeros(*k.shape[:-1], 1)
        feat = 1
    arrays = _arrays_of(structure)
    problem = EdgeAttention(DTYPES[q.dtype], arrays.idtype, heads_first)
    wide = getattr(torch, problem.accumulator)
    scores = torch.empty(heads * structure.nnz, dtype=wide, device=q.device)
    named: Named = {"q": q, "k": k, "v": v, "out": out, "scores": scores, "scale": scale}
    named |= {"indptr": arrays.indptr, "indices": arrays.indices}
    sizes = {"heads": heads, "feat": feat, "width": width}
    _run(structure, problem, (feat, width), sizes, named)
    return out


# -- one run of a kernel --------------------------------------------------------------------------


def _run(
    structure: Structure,
    problem: Problem,
    features: tuple[int, ...],
    sizes: dict[str, int],
    named: Named,
) -> None:
    """Run the kernel with the config that is recorded for a pattern, or that sizes choose.

    features, sizes : as :func:`sparsetir.planning.along_request.of_edges` takes them
    """

    def made(of: Structure) -> Kernel:
        wanted = of_edges(of.pattern, problem, features, sizes, target_of(of.device))
        tuned = not wanted.gpu and not isinstance(problem, EdgeMessages)
        in_order = (lambda: of.pattern.in_order) if tuned else None
        make = lambda config, _: compiled_by(config, problem, wanted.target)  # noqa: E731
        return made_for(wanted, make, in_order)

    kernel = structure.derived((problem, features, *sizes.values()), made)
    launch(kernel, {"m": structure.m, "n": structure.n, "nnz": structure.nnz, **sizes, **named})


class _Arrays:
    """What kernels take of a structure, made when it is first wanted."""

    @lasting
    def __init__(self, structure: Structure) -> None:
        arrays = (torch.from_numpy(x).to(structure.device) for x in structure.pattern[:2])
        self.indptr, self.indices = arrays
        self.idtype = dtype_name(self.indptr)
        self._order = structure.order

    @cached_property
    @lasting
    def order(self) -> Tensor:
        """(nnz,) place in the caller's order of each element."""
        if self._order is None:
            count, like = len(self.indices), self.indices
            return torch.arange(count, dtype=like.dtype, device=like.device)
        return self._order.to(self.indptr.dtype)

    @cached_property
    def ends(self) -> dict[str, Tensor]:
        """(nnz,) source "u" and target "v" of each element in the caller's order."""
        rows = torch.repeat_interleave(self.indptr.diff()).to(self.indptr.dtype)
        if self._order is None:
            return {"u": self.indices, "v": rows}
        source, target = torch.empty_like(self.indices), torch.empty_like(rows)
        source[self._order], target[self._order] = self.indices, rows
        return {"u": source, "v": target}


def _arrays_of(structure: Structure) -> _Arrays:
    return structure.derived(_Arrays, _Arrays)


def features_of(*operands: Tensor | None) -> tuple[Tensor, tuple[int, int]]:
    """An operand, and (heads, feat) of all together."""
    given = [x for x in operands if x is not None]
    heads, feat = torch.broadcast_shapes(*(x.shape[1:] for x in given))
    return given[0], (heads, feat)


def _dims(x: Tensor | None) -> str:
    """The dimensions that an operand has, as kernels name them."""
    if x is None:
        return ""
    return "h" * (x.shape[1] != 1) + "f" * (x.shape[2] != 1)


def _squeezed(x: Tensor | None) -> Tensor | None:
    """Without dimensions of size 1."""
    if x is None:
        return None
    return x.reshape(x.shape[0], *(s for s in x.shape[1:] if s != 1))
