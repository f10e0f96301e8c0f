"""The steps into which primitives divide an iteration: nested iterations, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx

from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    flat_axes,
    fresh_definitions,
    iterations_around,
    substitute,
)
from sparsetir.sparse_ir.schedule.loops import Change, Loop, changed
from sparsetir.sparse_ir.separate_init import separate_init
from sparsetir.sparse_ir.tir import as_one


class Steps(Change):
    """A change that divides an iteration into steps.

    axes, buffers : the declarations that they need
    """

    def __init__(self, change: Change) -> None:
        super().__init__(change.caller, change.func, change.it, change.chosen)
        self.axes: list[Axis] = []
        self.buffers: list[SparseBuffer] = []

    def step(
        self, what: str, loops: Sequence[Loop], body: Any, init: Any = None, **fields: Any
    ) -> SparseIteration:
        """A step over loops, named after the iteration."""
        name = self.name(what)
        return over_fresh_vars(changed(self.it, loops, name=name, body=body, init=init, **fields))

    def split_init(self) -> list[SparseIteration]:
        """The init as separate iterations, to be placed before; also declares their axes."""
        around = iterations_around(self.func, self.it)
        visited = [a.name for other in around for a in flat_axes(other.axes)]
        firsts = separate_init(self.it, self.func, visited)
        known = {a.name for a in self.func.axes}
        self.axes.extend(a for a in flat_axes(firsts[0].axes) if a.name not in known)
        return [over_fresh_vars(first) for first in firsts]

    def put_steps(
        self, outer: Sequence[Loop], steps: Sequence[Any], before: Sequence[Any] = ()
    ) -> SparseFunc:
        """The function with steps inside of the outer loops in place of the iteration."""
        main = as_one([*steps])
        if outer:
            main = changed(self.it, outer, init=None, body=main)
        return self.put(as_one([*before, main]), axes=self.axes, buffers=self.buffers)


def over_fresh_vars(it: SparseIteration, **fields: Any) -> SparseIteration:
    """An iteration with fresh coordinate variables and fresh variables in its body."""
    fresh = {v: tirx.Var(v.name, v.ty.dtype) for v in it.vars} | fresh_definitions(it.body)
    init = None if it.init is None else substitute(it.init, fresh)
    coordinates = [fresh[v] for v in it.vars]
    return changed(it, vars=coordinates, init=init, body=substitute(it.body, fresh), **fields)
