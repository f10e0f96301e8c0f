"""What is known of a function: a table of facts by parameter, buffer and axis, and its printer.

Facts follow from the structure, which is checked, and from the recipes of computed parameters; a
schedule adds promises and assumptions. They are read once per function, and never stored:

    >>> print(known(func))
    I_at    searched for by kernels
    feat    a multiple of 64
    i_at    computed by row_of_position
    i_at    values in [0, m)
    indices values in [0, n)
    indptr  values in [0, nnz + 1)

So `X[I_at[e], k]` needs no guard if X lies over the rows, and a loop over e that writes
`Out[order[e]]` is free of races if `order` has each value once. `sparsetir explain` shows these
facts with --stages, and what is known of loops.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any

from sparsetir.sparse_ir.computed import computed_parameters, keyword
from sparsetir.sparse_ir.nodes import Axis, SparseFunc, declared, variables_of
from sparsetir.sparse_ir.promises import KINDS, assumed, promises_of
from sparsetir.sparse_ir.recipes.registry import (
    Below,
    LengthOf,
    NonzerosOf,
    RowsOf,
    SameAs,
    facts_of,
)
from sparsetir.sparse_ir.rows import found_rows
from sparsetir.sparse_ir.tir import as_dtype, size_text


@lru_cache(16)  # by identity
def known(func: SparseFunc) -> Known:
    """The facts of a function."""
    return Known(func)


class Known:
    """The facts of one function; variables are those of buffers in stage I, all else is by name.

    computed : the recipes and keywords of computed parameters, see :func:`computed_parameters`
    recipes : the facts that hold for the results of these recipes
    arrays : buffers by their parameters
    steps : the length of each step of the parameters that count steps through an axis
    counted : sparse_fixed axes whose coordinates are 0, 1, ... under each parent
    filled : sparse_fixed axes without padding
    inside : (buffer, axis) of the buffers that are only accessed at coordinates of the axis
    """

    def __init__(self, func: SparseFunc) -> None:
        self.func, self.computed = func, computed_parameters(func)
        self.recipes = {name: facts_of(how["recipe"]) for name, how in self.computed.items()}
        buffers = declared(func).buffers.values()
        self.arrays = {str(b.handle.name): b for b in buffers if b.handle is not None}
        steps = {n: self.computed[n][x.steps] for n, x in self.recipes.items() if x.steps}
        self.steps = {n: int(step) for n, step in steps.items() if not isinstance(step, str)}
        made = {name for name, facts in self.recipes.items() if facts.counted}
        fixed = (a for a in declared(func).axes.values() if a.kind == "sparse_fixed")
        self.counted = {a.name for a in fixed if str(a.indices.name) in made}
        self.filled = self.counted | {f["axis"] for f in assumed(func, "filled")}
        self.inside = {(f["buffer"], f["axis"]) for f in assumed(func, "inside")}

    @cached_property
    def lengths(self) -> dict[str, Any]:
        """Lengths L by parameter, of the arrays whose values are in [0, L)."""
        return _Lengths(self).known

    @cached_property
    def domains(self) -> dict[Any, Any]:
        """The :attr:`lengths` by variable of a buffer, with those that are assumed."""
        buffers, axes = declared(self.func).buffers, declared(self.func).axes
        out = {b.var: self.lengths[name] for name, b in self.arrays.items() if name in self.lengths}
        said = assumed(self.func, "coordinates")
        return out | {buffers[f["buffer"]].var: axes[f["axis"]].length for f in said}

    @cached_property
    def permutations(self) -> dict[Any, int]:
        """Variables of the buffers without repeated values, and of what these are multiples."""
        multiples: dict[str, int] = {}
        for name, how in self.computed.items():
            facts = self.recipes[name]
            same = str(how[facts.distinct])[1:] if isinstance(facts.distinct, str) else None
            if same in multiples if same is not None else facts.distinct:
                multiples[name] = 1 if facts.multiples is None else int(how[facts.multiples])
        return {b.var: multiples[name] for name, b in self.arrays.items() if name in multiples}

    @cached_property
    def made_axes(self) -> set[str]:
        """The axes whose arrays or sizes recipes compute.

        Values computed from them, or from computed parameters, are a primitive's, and are trusted.
        """
        return {
            a.name
            for a in declared(self.func).axes.values()
            for x in [a.indptr, a.indices, *variables_of(a.length)]
            if x is not None and str(x.name) in self.computed
        }

    def __str__(self) -> str:
        """A line for each fact, in the order of the names."""
        func = self.func
        lines = [(p["param"], KINDS[p["kind"]].format(p["value"])) for p in promises_of(func)]
        lines += [(name, f"computed by {how['recipe']}") for name, how in self.computed.items()]
        lines += [(name, "searched for by kernels") for name in found_rows(func)]
        lines += [(name, f"values in [0, {size_text(n)})") for name, n in self.lengths.items()]
        said = assumed(func, "coordinates")
        lines += [(f["buffer"], f"coordinates of {f['axis']}, as assumed") for f in said]
        lines += [(v.name, "each value once") for v in self.permutations]
        lines += [(name, "coordinates 0, 1, ... under each parent") for name in self.counted]
        lines += [(name, "no padding") for name in self.filled]
        lines += [(b, f"accessed at coordinates of {axis} alone") for b, axis in self.inside]
        width = max((len(name) for name, _ in lines), default=0)
        return "\n".join(f"{name:{width}} {what}" for name, what in sorted(lines))


class _Lengths:
    """The domains of recipes' results, from the known domains of their inputs.

    known : by parameter, the length L if its values are in [0, L); results are added
    """

    def __init__(self, facts: Known) -> None:
        self.known: dict[str, Any] = {}
        self.by_indptr: dict[str, Axis] = {}
        self.by_indices: dict[str, Axis] = {}
        for axis in declared(facts.func).axes.values():
            if axis.kind == "sparse_variable":  # slots of a sparse_fixed axis may be padding
                self.known[str(axis.indices.name)] = axis.length
                self.by_indices[str(axis.indices.name)] = axis
            if axis.indptr is not None:
                self.by_indptr[str(axis.indptr.name)] = axis
                self.known[str(axis.indptr.name)] = axis.nnz + as_dtype(1, axis.idtype)
        for name, how in facts.computed.items():
            buffer = facts.arrays.get(name)
            dtype = None if buffer is None else buffer.dtype
            length = self._length(facts.recipes[name].values, how, dtype)
            if length is not None:
                self.known[name] = length

    def _length(self, said: Any, how: Mapping[str, Any], dtype: str | None) -> Any:
        """The length that a recipe's fact implies for a buffer of a type, or None."""
        names = {key: str(value)[1:] for key, value in how.items()}
        match said:
            case RowsOf(indptr, run):
                axis = self.by_indptr.get(names[indptr])
                if axis is None or axis.parent.kind != "dense_fixed":
                    return None
                length = axis.parent.length
                return length if run is None else length - as_dtype(how[run] - 1, axis.idtype)
            case NonzerosOf(indptr, indices, run):
                axis = self.by_indptr.get(names[indptr]) if indptr else None
                axis = self.by_indices.get(names[indices]) if indices else axis
                if axis is None or run is None:
                    return None if axis is None else axis.nnz
                return axis.nnz - as_dtype(how[run] - 1, axis.idtype)
            case LengthOf(length, run):
                axes = self.by_indices.values()
                axis = next((a for a in axes if keyword(a.length) == how[length]), None)
                if axis is None or run is None:
                    return None if axis is None else axis.length
                return axis.length - as_dtype(how[run] - 1, axis.idtype)
            case Below(bound):
                return None if dtype is None else as_dtype(how[bound], dtype)
            case SameAs(array):
                return self.known.get(names[array])
        return None
