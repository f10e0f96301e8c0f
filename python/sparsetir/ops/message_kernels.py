"""Runs the kernels of messages, softmax and attention on torch tensors, without gradients.

Features are (nodes or nnz, heads, feat) here, where heads and feat may be 1 to be the same for all;
values of edges come and go in the caller's order of a structure.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor

from sparsetir.compiled import compiled
from sparsetir.lower import lower_template
from sparsetir.ops.structure import DTYPES, Structure, target_of
from sparsetir.schedules.templates import (
    edge_attention,
    edge_messages,
    edge_softmax,
    messages,
)
from sparsetir.schedules.templates.message_tiles import Tile
from sparsetir.waking import pays

__all__ = [
    "EXPONENTIAL",
    "attention",
    "gsddmm",
    "gspmm",
    "is_parallel",
    "softmax",
    "softmax_backward",
]

BLOCKS_PER_THREAD = 8
# Features of a GPU thread at a time.
GPU_TILE = 4
# Additions that take as long as an exponential.
EXPONENTIAL = 8


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
    given = [x for x in (u, e) if x is not None]
    dtype, sizes = given[0].dtype, _sizes(*given)
    if arg and dtype == torch.bfloat16 and len(given) == 2:  # see Messages
        wide, winners = gspmm(structure, given[0].float(), given[1].float(), op, reduce, arg)
        return wide.to(dtype), winners
    heads, feat = sizes
    out = given[0].new_zeros(structure.m, heads, feat) if found is None else found
    winners = torch.full(out.shape, -1, dtype=torch.int64, device=out.device) if arg else None
    if not out.numel() or not structure.nnz:
        return out, winners
    arrays = _arrays_of(structure)
    ordered = arg or (e is not None and arrays.order is not None)
    problem = messages.Messages(
        op, reduce, _dims(u), _dims(e), DTYPES[dtype], arrays.idtype, ordered, arg,
        found is not None,
    )  # fmt: skip
    run = _Run(structure, structure.nnz * heads * feat)
    config = run.tile(feat)
    named = {"u": _squeezed(u), "e": _squeezed(e), "out": out}
    if ordered:
        named["order"] = arrays.places if arrays.order is None else arrays.order
    if arg:
        named["arg_out"] = winners = torch.empty(
            out.shape, dtype=arrays.indptr.dtype, device=out.device
        )
    if u is not None:
        named["indices"] = arrays.indices
    numbers = {"heads": heads, "feat": feat, "m": structure.m, "nnz": structure.nnz}
    if u is not None:
        numbers["n"] = structure.n
    run(messages, problem, config, {**named, "indptr": arrays.indptr}, numbers)
    return out, None if winners is None else winners.long()


def gsddmm(
    structure: Structure, lhs: Tensor | None, rhs: Tensor | None, op: str, targets: tuple[str, str]
) -> Tensor:
    """(nnz, heads, feat) values of edges, of operands at their sources "u", targets "v" or "e".

    For "dot" feat of the result is 1.
    """
    given = [x for x in (lhs, rhs) if x is not None]
    heads, feat = _sizes(*given)
    dot = op == "dot"
    out = given[0].new_zeros(structure.nnz, heads, 1 if dot else feat)
    if not out.numel() or not feat:
        return out
    arrays = _arrays_of(structure)
    at = ["edge" if target == "e" else "node" for target in targets]
    problem = edge_messages.EdgeMessages(
        op, _dims(lhs), _dims(rhs), at[0], at[1], DTYPES[out.dtype], arrays.idtype
    )
    run = _Run(structure, structure.nnz * heads * feat)
    config = run.tile(feat)
    named = {"lhs": _squeezed(lhs), "rhs": _squeezed(rhs), "out": out.squeeze(-1) if dot else out}
    numbers = {"heads": heads, "nnz": structure.nnz, "feat": feat}
    for side, operand, target in zip(("lhs", "rhs"), (lhs, rhs), targets, strict=True):
        if operand is not None and target != "e":
            named[f"{side}_of"] = arrays.ends[target]
            numbers[f"{side}_nodes"] = len(operand)
    run(edge_messages, problem, config, named, numbers)
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
    run = _Run(structure, first.numel() * EXPONENTIAL)
    config = run.tile(heads)
    problem = edge_softmax.EdgeSoftmax(DTYPES[wide], arrays.idtype, backward)
    names = ("y", "g", "dx") if backward else ("x", "y")
    flat = [x.reshape(-1, heads) for x in (*moved, out)]
    named = {**dict(zip(names, flat, strict=True)), "indptr": arrays.indptr}
    numbers = {"batch": batch, "m": structure.m, "nnz": structure.nnz, "heads": heads}
    run(edge_softmax, problem, config, named, numbers)
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
    problem = edge_attention.EdgeAttention(DTYPES[q.dtype], arrays.idtype, heads_first)
    run = _Run(structure, structure.nnz * heads * (feat + width + EXPONENTIAL))
    config = edge_attention.AttentionTiles(run.tile(feat), run.tile(width))
    wide = getattr(torch, problem.accumulator)
    named = {
        "q": q, "k": k, "v": v, "out": out, "indptr": arrays.indptr, "indices": arrays.indices,
        "scores": torch.empty(heads * structure.nnz, dtype=wide, device=q.device),
    }  # fmt: skip
    numbers = {
        "m": structure.m, "n": structure.n, "nnz": structure.nnz, "heads": heads, "feat": feat,
        "width": width, "scale": scale,
    }  # fmt: skip
    run(edge_attention, problem, config, named, numbers)
    return out


# -- one run of a kernel --------------------------------------------------------------------------


class _Run:
    """A call of a template's kernel: how many threads it takes, and what it is compiled for."""

    def __init__(self, structure: Structure, work: int) -> None:
        self.structure, self.gpu = structure, structure.device.type == "cuda"
        self.parallel = not self.gpu and is_parallel(work)

    def tile(self, feat: int) -> Tile:
        """Tiles of a number of features."""
        if self.gpu:
            return replace(Tile.for_features(feat, most=GPU_TILE), gpu=True)
        found = Tile.for_features(feat, self.parallel)
        return replace(found, blocks=_threads() * BLOCKS_PER_THREAD) if self.parallel else found

    def __call__(
        self, template: Any, problem: Any, config: Any, named: dict[str, Any],
        numbers: dict[str, Any],
    ) -> None:  # fmt: skip
        """Compile the kernel if it is new, and run it."""
        structure, target = self.structure, target_of(self.structure.device)
        key = template.__name__, problem, config
        stages = partial(lower_template, template, problem, config, target)
        kernel = compiled(key, target, stages)
        arrays = {name: x for name, x in named.items() if x is not None}
        structure.call(kernel, arrays, numbers)


def is_parallel(work: int) -> bool:
    """Whether to wake the other threads of a CPU for so many multiplications."""
    return pays(_threads(), work)


@cache
def _threads() -> int:
    named = os.environ.get("TVM_NUM_THREADS", "")
    return int(named) if named.isdecimal() and int(named) else os.cpu_count() or 1


class _Arrays:
    """What kernels take of a structure, made when it is first wanted."""

    def __init__(self, structure: Structure) -> None:
        self.indptr, self.indices, self.places = structure.index_arrays
        self.idtype = DTYPE_NAMES[self.indptr.dtype]
        self._degrees = self.indptr[1:] - self.indptr[:-1]
        self._order = structure.order

    @cached_property
    def order(self) -> Tensor | None:
        """(nnz,) place in the caller's order of each element, None where it is the same."""
        return None if self._order is None else self._order.to(self.indptr.dtype)

    @cached_property
    def ends(self) -> dict[str, Tensor]:
        """(nnz,) source "u" and target "v" of each element in the caller's order."""
        rows = torch.repeat_interleave(self._degrees).to(self.indptr.dtype)
        if self._order is None:
            return {"u": self.indices, "v": rows}
        source, target = torch.empty_like(self.indices), torch.empty_like(rows)
        source[self._order], target[self._order] = self.indices, rows
        return {"u": source, "v": target}


DTYPE_NAMES = {torch.int32: "int32", torch.int64: "int64"}


def _arrays_of(structure: Structure) -> _Arrays:
    return structure.derived(_Arrays, _Arrays)


def _sizes(*given: Tensor) -> tuple[int, int]:
    """Heads and features of operands together."""
    heads, feat = torch.broadcast_shapes(*(x.shape[1:] for x in given))
    return heads, feat


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
