"""`torch.ops.sparsetir.region`: a region of a model's graph, run by its kernel."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsetir.graph.orders import arranged, check, order_of, places_between
from sparsetir.graph.programs import GIVEN, Program
from sparsetir.ops.cache import is_private
from sparsetir.ops.registry import LIBRARY
from sparsetir.ops.structure import plain_tensor
from sparsetir.runtime.kernel import Kernel

# Programs by number, as torch's operators take no objects; equal programs have one number.
PROGRAMS: list[Program] = []
_numbers: dict[Program, int] = {}


def number_of(program: Program) -> int:
    """Of a program, by which the operator finds it."""
    if program not in _numbers:
        _numbers[program] = len(PROGRAMS)
        PROGRAMS.append(program)
    return _numbers[program]


class _Prepared(NamedTuple):
    """What a kernel takes of indices.

    kernel : and the arrays and sizes that it takes of them, by name
    moved : operands of edges that are brought in the order of the rows before, and how
    computed : what its schedule computes of these, by sizes
    places : of the result among the given edges, None where these have the same order
    alone : nodes without edges, of extrema
    """

    kernel: Kernel
    arrays: dict[str, Any]
    moved: dict[int, Tensor]
    computed: dict[tuple[int, ...], dict[str, Any]]
    places: Tensor | None
    alone: Tensor | None


def _prepare(program: Program, indices: list[Tensor], m: int) -> _Prepared:
    rows, others = indices[0], indices[1 : 1 + program.others]
    check(rows, m)
    order = order_of(rows)
    arrays: dict[str, Any] = {"indptr": order.starts(m), "m": m, "edges": len(rows)}
    for n, index in enumerate(others):
        arrays[f"index{n}"] = arranged(index, rows)
    aligned, moved = [], {}
    for n, operand in enumerate(program.operands):
        places = None
        if operand.at == "edge" and operand.number:
            of = None if operand.number == GIVEN else indices[operand.number]
            places = places_between(of, rows)
        # One number for many features: it is brought in order before.
        few = program.loops > 0 and all(a is None for a in operand.axes)
        aligned.append(places is None or few)
        if places is not None and few:
            moved[n] = places
        elif places is not None:
            arrays[f"place{n}"] = places
    kernel = program.kernel(tuple(aligned))
    extremum = program.reduce in ("max", "min")
    alone = order.without_edges(m) if extremum else None
    return _Prepared(kernel, arrays, moved, {}, order.places, alone)


class Region:
    """A region, with what was prepared for the indices that it was last called with."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.__name__ = "region"  # which graphs of torch want of functions
        self._last: tuple[Any, int, _Prepared] | None = None

    def _prepared(self, indices: list[Tensor], m: int) -> _Prepared:
        if self._last is not None:
            last, size, found = self._last
            if size == m and all(
                ref() is x and version == x._version
                for (ref, version), x in zip(last, indices, strict=True)
            ):
                return found
        found = _prepare(self.program, indices, m)
        if all(map(is_private, indices)):
            self._last = [(weakref.ref(x), x._version) for x in indices], m, found
        else:
            self._last = None
        return found

    def __call__(
        self, operands: list[Tensor], indices: list[Tensor], shape: list[int], m: int, given: bool
    ) -> Tensor:
        """The result, of a shape.

        m : nodes that edges are reduced at, or by which they are sorted
        given : values of edges are wanted in the order in which the edges were given
        """
        program = self.program
        out = torch.empty(shape, dtype=torch.float32)
        if not len(indices[0]) or not out.numel():
            return out.zero_()
        prepared = self._prepared(indices, m)
        named = dict(prepared.arrays)
        for n, (x, operand) in enumerate(zip(operands, program.operands, strict=True)):
            if x.dtype != torch.float32:
                x = x.to(torch.float32)
            if n in prepared.moved:
                if operand.number == GIVEN and is_private(x):
                    x = arranged(x, indices[0])
                else:
                    x = x.view(-1).index_select(0, prepared.moved[n]).view(x.shape)
            first = 0 if operand.at == "all" else 1
            for size, axis in zip(x.shape[first:], operand.axes, strict=True):
                if axis is not None:
                    named[f"d{axis}"] = size
            if operand.at == "other":
                named[f"n{operand.number}"] = len(x)
                check(indices[1 + operand.number], len(x))
            named[f"x{n}"] = _shaped(x.detach(), operand.axes, first)
        for size, axis in zip(shape[1:], program.result, strict=True):
            if axis is not None:
                named[f"d{axis}"] = size
        named["out"] = _shaped(out, program.result, 1)
        kernel = prepared.kernel
        if kernel.computed:
            sizes = tuple(x for x in named.values() if isinstance(x, int))
            if sizes not in prepared.computed:
                prepared.computed[sizes] = kernel.compute(named)
            named.update(prepared.computed[sizes])
        kernel.run_unchecked([named[name] for name in kernel.signature.passed])
        if prepared.alone is not None:
            out.index_fill_(0, prepared.alone, 0.0)
        if program.reduce is None and given and prepared.places is not None:
            out = torch.empty_like(out).index_copy_(0, prepared.places, out)
        return out


def _shaped(x: Tensor, axes: tuple[int | None, ...], first: int) -> Tensor:
    """As kernels take it: contiguous, without the dimensions of size 1 that no loop goes along."""
    if None in axes or not x.dim():
        sizes = [size for size, a in zip(x.shape[first:], axes, strict=True) if a is not None]
        x = x.reshape([*x.shape[:first], *sizes] or [1])
    return plain_tensor(x)


def _run(program: int, operands: list[Tensor], indices: list[Tensor], *rest: Any) -> Tensor:
    return Region(PROGRAMS[program])(operands, indices, *rest)


def _fake(program: int, operands: list[Tensor], indices: list[Tensor], shape: Any, *_: Any) -> Any:
    return (operands or indices)[0].new_empty(shape, dtype=torch.float32)


def _restored(values: Tensor, rows: Tensor) -> Tensor:
    places = order_of(rows).places
    return (
        values.clone()
        if places is None
        else torch.empty_like(values).index_copy_(0, places, values)
    )


LIBRARY.define(
    "region(int program, Tensor[] operands, Tensor[] indices, SymInt[] shape, SymInt m, bool given)"
    " -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.impl("region", _run, "CompositeExplicitAutograd")
torch.library.register_fake("sparsetir::region", _fake, lib=LIBRARY)
region: Callable[..., Tensor] = torch.ops.sparsetir.region.default

# Values of edges that are sorted by an index, in the order in which the edges were given.
LIBRARY.define("restored(Tensor values, Tensor rows) -> Tensor")
LIBRARY.impl("restored", _restored, "CompositeExplicitAutograd")
torch.library.register_fake("sparsetir::restored", lambda x, _: torch.empty_like(x), lib=LIBRARY)
restored: Callable[..., Tensor] = torch.ops.sparsetir.restored.default
