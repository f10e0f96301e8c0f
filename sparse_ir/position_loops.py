"""The loops of an iteration, with the position and coordinate of each axis inside them.

One loop per axis, or one over the joint positions of fused axes, from which the axes' own positions
are recovered: by searching offsets above a variable axis, by division below it. The loop of a part
runs over its positions, to which the first is added. (SparseTIR, section 3.3.1, steps 2 and 3.)
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from sparsetir.sparse_ir.annotations import GALLOP
from sparsetir.sparse_ir.merge_loops import merge_loop
from sparsetir.sparse_ir.names import numbered
from sparsetir.sparse_ir.nodes import (
    AttachedAxis,
    Axis,
    FusedAxis,
    PartAxis,
    SparseIteration,
    visited_node,
)
from sparsetir.sparse_ir.position_loop import PositionLoop, extent_under, parents_of
from sparsetir.sparse_ir.position_space import PositionSpace, in_one_row
from sparsetir.sparse_ir.search import find_last_start, whole
from sparsetir.sparse_ir.tir import as_dtype, dtype_of, free_vars, type_of_product
from sparsetir.sparse_ir.translate import Scope, Translator, Visit


class PositionLoops:
    """The loops of the iterations of one function."""

    def __init__(self, space: PositionSpace, translate: Translator) -> None:
        self.space = space
        self.translate = translate
        self._taken: set[str] = set()  # names of the current iteration's loops

    def of(self, it: SparseIteration, scope: Scope) -> list[PositionLoop]:
        """The loops of an iteration; registers the position of each axis in `scope`."""
        units: list[PositionLoop] = []
        self._taken = set()
        for entry, at, end in it.entries():
            node, by = visited_node(entry), entry.by if isinstance(entry, PartAxis) else None
            coords, kinds = it.vars[at:end], it.kinds[at:end]
            if isinstance(node, Axis) and node.is_merged:
                wish = self._variables(coords[0].name, node.idtype)[0].name
                ratio = int(it.annotations.get(GALLOP, {}).get(node.name, 0))
                more = scope, self.space, self.translate, ratio
                units.append(merge_loop(node, coords[0], kinds, wish, *more))
            elif isinstance(node, FusedAxis):
                units.append(self._fused_unit(node, coords, kinds, scope, by))
            else:
                units.append(self._axis_unit(node, coords[0], kinds, scope, by))
        return units

    def _axis_unit(
        self, node: Any, coord_var: Any, kind: str, scope: Scope, by: Axis | None
    ) -> PositionLoop:
        axis = node.axis if isinstance(node, AttachedAxis) else node
        parents = parents_of(node, scope)
        loop, var = self._variables(coord_var.name, axis.idtype)
        extent = extent_under(node, parents, scope, self.space)
        pos = var
        if by is not None:
            extent, pos = self._in_part(by, var, scope)
            if axis.is_variable and not in_one_row(axis):
                pos = pos - self.space.start(axis, parents)
        coord = self.space.coordinate(axis, [*parents, pos])
        self._visit(axis, coord_var, pos, coord, parents, scope)
        if by is not None:
            scope.visits[axis.name].part = by.indptr, var
        pads = [coord >= 0] if self.space.has_padding(axis) else []
        return PositionLoop(node, [coord_var], kind, loop, var, extent, pads)

    def _variables(self, wish: str, dtype: str) -> tuple[Any, Any]:
        """The variables of the loop and the block, with names unique in the iteration.

        Race facts refer to them by name (:mod:`sparsetir.sparse_ir.races`).
        """
        name = numbered(wish, self._taken)
        self._taken.add(name)
        return tirx.Var(name, dtype), tirx.Var("v" + name, dtype)

    def _in_part(self, by: Axis, var: Any, scope: Scope) -> tuple[Any, Any]:
        """The number of positions of the part, and the storage position of its element `var`."""
        over = parents_of(by, scope)
        first = as_dtype(0, by.idtype) if in_one_row(by) else self.space.start(by, over)
        return self.space.extent(by, over), first + var

    @staticmethod
    def _visit(
        axis: Axis, coord_var: Any, pos: Any, coord: Any, parents: list[Any], scope: Scope
    ) -> None:
        scope.visits[axis.name] = Visit(axis, pos, coord, parents)
        scope.coords[coord_var] = coord

    def _fused_unit(
        self, node: FusedAxis, coords: list[Any], kinds: str, scope: Scope, by: Axis | None
    ) -> PositionLoop:
        """One loop over the joint positions, from which each axis's own position is recovered.

        The axes form runs, each an axis and its descendants; in a run that holds a variable axis,
        positions above it are recovered by searching its offsets, fixed ones by division.
        """
        axes = list(node.axes)
        runs: list[list[int]] = []
        for n, axis in enumerate(axes):
            if runs and axis.parent is not None:
                runs[-1].append(n)
            else:
                runs.append([n])
        factors = [x for run in runs for x in self._run_factors([axes[n] for n in run])]
        dtype = type_of_product(factors, [a.idtype for a in axes])
        loop, var = self._variables("".join(c.name for c in coords), dtype)
        sizes = [self._run_size([axes[n] for n in run], scope, dtype) for run in runs]
        unit = PositionLoop(node, coords, kinds, loop, var, _product(sizes, dtype))
        rest: Any = var
        if by is not None:  # then the axes are one run from a root, with stored joint positions
            extent, rest = self._in_part(by, var, scope)
            unit.extent = as_dtype(extent, dtype)
        for number, run in enumerate(runs):
            inner = _product(sizes[number + 1 :], dtype)
            here = rest if number + 1 == len(runs) else tirx.floordiv(rest, inner)
            rest = rest if number + 1 == len(runs) else tirx.floormod(rest, inner)
            self._recover([axes[n] for n in run], [coords[n] for n in run], here, unit, scope)
        return unit

    def _run_size(self, run: list[Axis], scope: Scope, dtype: str) -> Any:
        base, end = self._run_bounds(run, scope, dtype)
        return as_dtype(end - base if base is not None else end, dtype)

    def _run_factors(self, run: list[Axis]) -> list[Any]:
        """Factors of a run's size: the elements of the last variable axis, and extents below."""
        last = max((n for n, a in enumerate(run) if a.is_variable), default=-1)
        stored = [run[last].nnz] if last >= 0 else []
        return [*stored, *(self.space.extent(a, []) for a in run[last + 1 :])]

    def _run_bounds(self, run: list[Axis], scope: Scope, dtype: str) -> tuple[Any, Any]:
        """First (None for 0) and past-the-end offset of a run, in elements of its last axis."""
        variable = [n for n, a in enumerate(run) if a.is_variable]
        outer = parents_of(run[0], scope) if run[0].parent is not None else []
        factors = self._run_factors(run)
        factor = _product(factors[bool(variable) :], dtype)
        if not variable:
            return None, factor
        last = run[variable[-1]]
        if not outer:
            return None, as_dtype(factors[0], dtype) * factor
        above = run[: variable[-1]]
        head = [self.space.extent(run[0], outer), *([0] * (len(above) - 1))] if above else []
        base = self._offset(last, outer, [as_dtype(0, a.idtype) for a in above])
        if above:
            end = self._offset(
                last, outer, [as_dtype(h, a.idtype) for h, a in zip(head, above, strict=True)]
            )
        else:
            end = self.space.start(last, outer, 1)
        return as_dtype(base, dtype) * factor, as_dtype(end, dtype) * factor

    def _offset(self, last: Axis, outer: list[Any], above: list[Any]) -> Any:
        return self.space.start(last, [*outer, *above])

    def _recover(
        self, run: list[Axis], coords: list[Any], joint: Any, unit: PositionLoop, scope: Scope
    ) -> None:
        outer = parents_of(run[0], scope) if run[0].parent is not None else []
        variable = [n for n, a in enumerate(run) if a.is_variable]
        split = variable[-1] if variable else -1
        after = run[split + 1 :]
        positions: list[Any] = []
        tail: list[Any] = []
        for axis in reversed(after):
            extent = as_dtype(self.space.extent(axis, []), dtype_of(joint))
            if axis is run[0]:
                tail.insert(0, joint)
            else:
                tail.insert(0, tirx.floormod(joint, extent))
                joint = tirx.floordiv(joint, extent)
        if variable:
            positions = self._recover_variable(run[: split + 1], outer, joint, unit)
        positions += tail
        for n, (axis, coord_var) in enumerate(zip(run, coords, strict=True)):
            pos = as_dtype(positions[n], axis.idtype)
            parents = [*outer, *positions[:n]]
            coord = self.space.coordinate(axis, [*parents, pos])
            self._visit(axis, coord_var, pos, coord, parents, scope)
            if self.space.has_padding(axis):
                unit.pads.append(coord >= 0)

    def _recover_variable(
        self, run: list[Axis], outer: list[Any], joint: Any, unit: PositionLoop
    ) -> list[Any]:
        """Positions of a run that ends in a variable axis, from an offset into that axis."""
        last = run[-1]
        if outer:
            zeros = [as_dtype(0, a.idtype) for a in run[:-1]]
            joint = joint + self._offset(last, outer, zeros)
        positions: list[Any] = []
        for n, axis in enumerate(run[:-1]):
            result = self.translate.local(f"{axis.name}_at", axis.idtype)
            above, below = (*positions,), (*(as_dtype(0, a.idtype) for a in run[n + 1 : -1]),)

            def start_of(x: Any, above: tuple = above, below: tuple = below) -> Any:
                return self._offset(last, outer, [*above, x, *below])

            extent = self.space.extent(axis, [*outer, *positions])
            reads = self.translate.reads_of([extent, joint, *positions])
            search = find_last_start(
                f"find_{result.name}",
                result,
                start_of,
                (as_dtype(0, dtype_of(extent)), extent),
                joint,
                [*reads, whole(self.space.indptr(last))],
            )
            unit.searches.append(self.translate.made(*search, free_vars(joint) | {unit.var}))
            positions.append(tirx.BufferLoad(result, [0]))
        pos = joint - as_dtype(self._offset(last, outer, positions), dtype_of(joint))
        return [*positions, as_dtype(pos, last.idtype)]


def _product(factors: list[Any], dtype: str) -> Any:
    out = as_dtype(1, dtype)
    for n, factor in enumerate(factors):
        out = as_dtype(factor, dtype) if n == 0 else out * as_dtype(factor, dtype)
    return out
