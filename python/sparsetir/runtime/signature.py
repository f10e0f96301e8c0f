"""The calling convention of kernels: parameters, their shapes, and checks of arguments.

The natural shape of a buffer over dense axes is their lengths. A sparse axis and the axes above it
are one dimension, that of their elements, and a ragged one with all axes before it: (nnz,) for CSR,
(blocks, b, b) for BSR, (heads, nnz) for CSR with heads. Contiguous arrays of such buffers are also
accepted in other shapes, under any schedule: flat, with one dimension for these and those before,
(heads * blocks, b, b), and with a constant number of slots as a dimension, (rows, slots).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tvm import ir, tirx
from tvm.sym import Analyzer
from tvm.target import Target
from tvm_ffi import structural_equal

from sparsetir.runtime.arrays import (
    device_name,
    dtype_name,
    hidden,
    is_array,
    is_contiguous,
    is_read_only,
    reshaped,
    strides,
)
from sparsetir.sparse_ir.affine import affine
from sparsetir.sparse_ir.computed import computed_parameters, reads, value_parameters
from sparsetir.sparse_ir.nodes import Axis, SparseFunc, make_func, same_indices, substitute, walk
from sparsetir.sparse_ir.position_space import (
    LAYOUTS,
    SIGNATURE,
    Layout,
    PositionSpace,
    positional_size,
)
from sparsetir.sparse_ir.promises import check_promises, promises_of
from sparsetir.sparse_ir.recipes.locality import reuse_distance
from sparsetir.sparse_ir.storage import Storage, elements_of, product
from sparsetir.sparse_ir.tir import BINARY, dtype_of, is_one, size_text

# Attribute of a signature's function: computed parameters that the compiled function lacks.
NOT_PASSED = "not_passed"
REMEMBERED = 64  # cached conversions of shapes
REUSE_DISTANCE = reuse_distance.__name__
PENDING = object()  # a placeholder for an array that does not exist yet


class Inference(NamedTuple):
    """A rule for a scalar from an array of some rank: (shape[dim] - minus) / known scalars.

    divide : positions of the known scalars, or ~number for constants
    """

    scalar: int
    array: int
    rank: int
    dim: int
    minus: int
    divide: tuple[int, ...]


class Signature:
    """Parameters of a kernel: first the caller's, then the computed ones.

    source : a stage-I function, whose body is ignored, or a PrimFunc, without structure
    func : the stage-I function, whose axes determine the checks of index arrays
    names : the caller's parameters, in order
    computed : recipe and keywords of each computed parameter, by name, in the order of evaluation
    passed : parameters of the compiled function, in order: `names`, then the computed parameters
        that it needs (the others serve recipes only, or are lengths of these)
    of_values : the passed parameters that depend on values, and are computed in every call
    promises : assumptions of the schedule about scalars
    position : position of each parameter by name, including computed ones
    shapes : natural shape of each array parameter, None for scalars
    forms : all shapes that contiguous arrays may have, by their number of dimensions
    dtypes : dtype of each parameter
    outputs : positions of the arrays that the kernel writes
    arrays, scalars : positions of the caller's arrays and scalars
    index_arrays : positions of the caller's indptr and indices, and of other arrays that recipes
        read
    index_sizes : positions of the caller's scalars that bound index arrays, or that recipes read
    gathered : positions of arrays whose rows are gathered, and of the indices that select these
    inferences : rules for the caller's scalars from shapes
    constants : by position, scalars that no shape implies, and whose only value is promised
    """

    def __init__(self, source: SparseFunc | tirx.PrimFunc) -> None:
        plain = isinstance(source, tirx.PrimFunc)
        self.source = source
        self.func = func = _without_structure(source) if plain else source
        self.name: str = func.name
        self.params: list[tirx.Var] = list(source.params)
        self.computed: dict[str, dict[str, Any]] = computed_parameters(func)
        self.promises: list[dict[str, Any]] = promises_of(func)
        self.position: dict[str, int] = {str(p.name): i for i, p in enumerate(self.params)}
        self.names: list[str] = [n for n in self.position if n not in self.computed]
        absent = {str(n) for n in func.attrs.get(NOT_PASSED, [])}
        self.passed: list[str] = [n for n in self.position if n not in absent]
        follow_values = value_parameters(func)
        self.of_values: list[str] = [n for n in follow_values if n not in absent]
        space = None if plain else PositionSpace(func)
        arrays = self.params if space is None else space.params
        layouts, stored = {} if space is None else space.layouts, _stored(func, self.computed)
        self.shapes = [_shape(p, layouts) for p in arrays]
        self.forms = [
            {} if shape is None else _forms(shape, _by_trees(p, shape, layouts), stored)
            for p, shape in zip(arrays, self.shapes, strict=True)
        ]
        self.dtypes: list[str] = [_dtype(p) for p in arrays]
        positions = range(len(self.names))
        self.outputs: list[int] = [
            i for i in positions if self.names[i] in [*func.attrs.get("outputs", [])]
        ]
        self.arrays: list[int] = [i for i in positions if self.shapes[i] is not None]
        self.scalars: list[int] = [
            i for i in positions if self.shapes[i] is None and (plain or self.dtypes[i] != "handle")
        ]
        self._find_structure(set(follow_values))
        self._name_sizes()
        self._infer()
        self.gathered = [*self._find_gathered()]

    def _name_sizes(self) -> None:
        """Record which sizes are a caller's scalar (its position) or a number (~number), as most
        are; None for others."""
        place = {self.params[i]: i for i in self.scalars}

        def named(size: ir.Expr) -> int | None:
            if isinstance(size, tirx.IntImm):
                return ~int(size)
            return place.get(size) if isinstance(size, ir.Var) else None

        self._named = [[named(size) for size in shape or []] for shape in self.shapes]

    def _find_gathered(self) -> Iterator[tuple[int, int]]:
        """Pairs for :attr:`gathered`: dense inputs of which an axis with a reuse distance selects
        rows, and its indices."""
        counted = (how for how in self.computed.values() if how["recipe"] == REUSE_DISTANCE)
        handles = {str(how["indices"])[1:] for how in counted} & {*self.names}
        for axis in self.func.axes:
            if axis.indices is None or axis.indices.name not in handles:
                continue
            for b in self.func.buffers:
                place = -1 if b.handle is None else self.position.get(str(b.handle.name), -1)
                outer = [a.length for a in (b.axes or ())[:-1] if a.kind == "dense_fixed"]
                is_input = 0 <= place < len(self.names) and place not in self.outputs
                if is_input and any(structural_equal(axis.length, n) for n in outer):
                    yield place, self.position[str(axis.indices.name)]

    def _find_structure(self, follow_values: set[str]) -> None:
        """Find the caller's parameters that define the structure."""
        structure = [
            {**how, "values": None} if name in follow_values else how
            for name, how in self.computed.items()
        ]
        read = [name for how in structure for name in reads(how)]
        arrays = [h.name for a in self.func.axes for h in (a.indptr, a.indices) if h is not None]
        sizes: set[str] = set()
        for axis in self.func.axes:
            if axis.kind != "dense_fixed":
                for part in axis.ancestors():
                    for size in (part.length, part.nnz, part.nnz_cols):
                        sizes |= {str(v.name) for v in _variables(size)}
        for name in read:
            if self.shapes[self.position[name]] is None:
                sizes.add(name)
            else:
                arrays.append(name)
        names = [str(name) for name in arrays if name not in self.computed]
        self.index_arrays: list[int] = [self.position[name] for name in dict.fromkeys(names)]
        self.index_sizes: list[int] = sorted(self.position[n] for n in sizes - self.computed.keys())

    def _infer(self) -> None:
        """Find rules for omitted scalars, from shapes and promises."""
        steps = self.inferences_from(self.arrays)
        implied = {step.scalar for step in steps}
        exact = {self.position[p["param"]]: p["value"] for p in self.promises if _is_exact(p)}
        self.constants = {i: n for i, n in exact.items() if i in self.scalars and i not in implied}
        self.inferences = self.inferences_from(self.arrays, self.constants)
        self._by_ranks: dict[tuple[int, ...], list[Inference]] = {}
        # The natural shape of an array in another shape, by position, shape and scalars.
        self._natural: dict[tuple[Any, ...], tuple[int, ...] | None] = {}

    def inferences_from(
        self, arrays: Sequence[int], given: Iterable[int] = (), ranks: Sequence[int] = ()
    ) -> list[Inference]:
        """Rules, in order, for all scalars that shapes of arrays and known scalars imply.

        ranks : number of dimensions of each array; by default those of natural shapes
        """
        shapes = [self.shapes[array] or [] for array in arrays]
        if ranks:
            forms = [self.forms[array] for array in arrays]
            shapes = [f.get(rank, []) for f, rank in zip(forms, ranks, strict=True)]
        steps: list[Inference] = []
        known, progress = set(given), True
        while progress:
            progress = False
            for array, shape in zip(arrays, shapes, strict=True):
                for dim, size in enumerate(shape):
                    step = self._solve(size, array, (len(shape), dim), known)
                    if step is not None and step.scalar not in known:
                        known.add(step.scalar)
                        steps.append(step)
                        progress = True
        return steps

    def _solve(
        self, size: ir.Expr, array: int, where: tuple[int, int], known: set[int]
    ) -> Inference | None:
        terms = dict(affine(size).terms)
        minus = terms.pop((), 0)
        if len(terms) != 1:
            return None
        ((factors, number),) = terms.items()
        names = [str(f.name) for f in factors if isinstance(f, ir.Var)]
        if number < 1 or len(names) < len(factors) or not self.position.keys() >= {*names}:
            return None
        places = [*(self.position[name] for name in names), *([~number] if number > 1 else [])]
        unknown = [p for p in places if p >= 0 and p not in known]
        if len(unknown) != 1 or unknown[0] not in self.scalars:
            return None
        divide = tuple(p for p in places if p != unknown[0])
        return Inference(unknown[0], array, *where, minus, divide)

    def infer(self, values: list[Any]) -> None:
        """Fill in scalars that are None and implied by the shapes of arrays."""
        for i, value in self.constants.items():
            if values[i] is None:
                values[i] = value
        self._follow(self.inferences, values)
        for i in self.scalars:
            if values[i] is None:
                self._infer_from_ranks(values)
                break

    def _infer_from_ranks(self, values: list[Any]) -> None:
        arrays, constants = self.arrays, self.constants
        ranks = (*(len(self.shape_of(i, values, any_form=True) or ()) for i in arrays),)
        if ranks not in self._by_ranks:
            self._by_ranks[ranks] = self.inferences_from(arrays, constants, ranks)
        self._follow(self._by_ranks[ranks], values)

    @staticmethod
    def _follow(steps: list[Inference], values: list[Any]) -> None:
        for scalar, array, rank, dim, minus, divide in steps:
            if values[scalar] is not None:
                continue
            try:
                shape = values[array].shape
            except (AttributeError, RuntimeError):  # no array, or a nested tensor
                continue
            if len(shape) != rank:
                continue
            size = int(shape[dim]) - minus
            for i in divide:
                by = values[i] if i >= 0 else ~i
                if by is None:
                    break
                size //= by or 1
            else:
                values[scalar] = size

    def shape_of(
        self, at: int, values: Sequence[Any], *, any_form: bool = False
    ) -> Sequence[int] | None:
        """The shape of an array; None if it has an unexpected number of dimensions.

        any_form : whether shapes other than the natural one are expected, too
        """
        try:
            shape = values[at].shape
        except (AttributeError, RuntimeError):  # no array, or a nested tensor
            return None
        expected = self.forms[at] if any_form else (len(self.shapes[at] or []),)
        return shape if len(shape) in expected else None

    def flat(self, at: int, values: Sequence[Any]) -> Any:
        """Flatten an index array for recipes and checks."""
        array = self.view(at, values)
        fits = 1 in self.forms[at] and isinstance(array, np.ndarray) and is_contiguous(array)
        return array.reshape(-1) if fits else array

    def view(self, at: int, values: Sequence[Any]) -> Any:
        """View a contiguous array of any legal shape in its natural shape; others are unchanged."""
        shape, array = self.shape_of(at, values, any_form=True), values[at]
        if shape is None or len(shape) == len(self.shapes[at] or []) or not is_contiguous(array):
            return array
        key = (at, *shape, *[values[i] for i in self.scalars])
        if key not in self._natural:
            fits = [*shape] == self.expected_shape(at, values, len(shape))
            natural = (*self.expected_shape(at, values),) if fits else None
            self._natural = {**dict(list(self._natural.items())[-REMEMBERED:]), key: natural}
        natural = self._natural.get(key)
        return array if natural is None else reshaped(array, natural)

    def length_sources(self, array: int, expected: list[Any], values: Sequence[Any]) -> str:
        """A text that names the arrays which imply the expected sizes; "" for none."""
        shape, reasons = values[array].shape, []
        for dim, i in enumerate(self._named[array]):
            if i is None or i < 0 or len(shape) != len(expected) or shape[dim] == expected[dim]:
                continue
            for step in self.inferences:
                other = self.shape_of(step.array, values) if step.scalar == i else None
                if other is not None and step.array != array and not step.divide:
                    if int(other[step.dim]) - step.minus == values[i]:
                        names = self.names[i], values[i], self.names[step.array]
                        reasons.append("'{}' is {} by argument '{}'".format(*names))
        return f"; {', '.join(reasons)}" if reasons else ""

    def expected_shape(
        self, array: int, values: Sequence[Any], rank: int | None = None
    ) -> list[Any]:
        """The shape expected of an array with the scalars filled in, as ints or text.

        rank : the number of dimensions, for a shape other than the natural one
        """

        def known(size: ir.Expr, at: int | None) -> int | str:
            if at is not None and at < 0:
                return ~at
            if at is not None and values[at] is not None:
                return int(values[at])
            numbers = {
                self.params[i]: tirx.IntImm(dtype_of(self.params[i]), int(values[i]))
                for i in self.scalars
                if values[i] is not None and self.dtypes[i].startswith(("int", "uint"))
            }
            simplified = Analyzer().simplify(substitute(size, numbers))
            return int(simplified) if isinstance(simplified, tirx.IntImm) else size_text(simplified)

        sizes = self.forms[array].get(-1 if rank is None else rank)
        if sizes is not None and len(sizes) != len(self.shapes[array] or []):
            return [known(size, None) for size in sizes]
        sizes = self.shapes[array] or []
        return [known(size, at) for size, at in zip(sizes, self._named[array], strict=True)]

    def expected_text(self, array: int, values: Sequence[Any]) -> str:
        """A text with all shapes that an argument may have."""
        shapes = [self.expected_shape(array, values, rank) for rank in self.forms[array]]
        return " or ".join(f"({', '.join(map(str, s))}{',' * (len(s) == 1)})" for s in shapes)

    def unmet_promises(self, expected: list[object], got: list[int]) -> str:
        """A text with the promises that a shape does not meet; "" for none."""
        exact = {p["value"]: p["param"] for p in self.promises if _is_exact(p)}
        other = [e for e, g in zip(expected, got, strict=False) if e != g and e in exact]
        terms = " and ".join(f"'{exact[n]}' is {n}" for n in dict.fromkeys(other))
        return f", as its schedule promises that {terms}" if terms else ""


def _is_exact(promise: dict[str, object]) -> bool:
    return promise["kind"] == "exact"


def _variables(expr: ir.Expr | None) -> list[ir.Var]:
    variables: list[ir.Var] = []
    if expr is not None:
        walk(expr, lambda n: variables.append(n) if isinstance(n, ir.Var) else None)
    return variables


def _dtype(param: tirx.Var) -> str:
    return "handle" if isinstance(param.ty, ir.PointerType) else str(param.ty.dtype)


def _shape(
    param: tirx.Var, layouts: Mapping[str, Layout], rename: Callable[..., ir.Expr] = lambda e: e
) -> list[ir.Expr] | None:
    """The natural shape of a parameter; None for a scalar."""
    if not tirx.is_buffer_var(param):
        return None
    layout = layouts.get(param.name)
    return list(param.ty.shape) if layout is None else Storage(layout, {}, rename).natural_shape()


def _stored(func: SparseFunc, computed: Container[str]) -> list[list[ir.Expr]]:
    """For each axis with the caller's index arrays, its elements as dimensions, by slots."""
    return [
        _slots(axis)
        for axis in func.axes
        for handle in (axis.indptr, axis.indices)
        if handle is not None and str(handle.name) not in computed
    ]


def _slots(axis: Axis) -> list[ir.Expr]:
    if axis.kind != "sparse_fixed":
        return [elements_of(axis)]
    return [*([] if is_one(elements_of(axis.parent)) else _slots(axis.parent)), axis.nnz_cols]


def _key(size: ir.Expr) -> object:
    """A key that is equal for sizes that differ only in casts."""
    if isinstance(size, tirx.Cast):
        return _key(size.value)
    if isinstance(size, ir.Var):
        return str(size.name)
    if isinstance(size, tirx.IntImm):
        return int(size)
    if isinstance(size, BINARY):
        return type(size), _key(size.a), _key(size.b)
    return str(size)


def _by_trees(
    param: tirx.Var, natural: list[ir.Expr], layouts: Mapping[str, Layout]
) -> list[ir.Expr]:
    layout = layouts.get(param.name)
    return natural if layout is None else Storage(layout, {}, lambda size: size).by_trees()


def _forms(
    natural: list[ir.Expr], trees: list[ir.Expr], stored: list[list[ir.Expr]]
) -> dict[int, list[ir.Expr]]:
    """The shapes that arrays of a parameter may have, by their number of dimensions.

    trees : elements of each tree of axes

    Dimensions of stored elements may be by slots, or merged with all before them, or flat, whatever
    axes they belong to after scheduling, such as that of a loop over positions.
    """

    by_slots = {_key(product(sizes)): sizes for sizes in stored}
    slots = [size for n in trees for size in by_slots.get(_key(n), [n])]
    have, wanted = [*map(_key, slots)], [[*map(_key, sizes)] for sizes in stored]
    ends = [at + len(x) for x in wanted for at in range(len(have)) if x == have[at : at + len(x)]]
    if not ends:
        return {len(natural): natural}
    elements = [product(slots[: max(ends)]), *slots[max(ends) :]]
    flat = natural if len(natural) == 1 else [product(slots)]
    return {len(slots): slots, len(elements): elements, 1: flat, len(natural): natural}


def _without_structure(prim: tirx.PrimFunc) -> SparseFunc:
    """A function without axes for a PrimFunc that never was in stage I; it records the outputs."""
    name = str(prim.attrs["global_symbol"]) if "global_symbol" in prim.attrs else "main"
    written = set[str]()
    stores = tirx.BufferStore
    walk(prim.body, lambda n: written.add(n.buffer.name) if isinstance(n, stores) else None)
    return make_func(name, [], [], [], tirx.Evaluate(0), {"outputs": sorted(written)})


def signature_of(stages: Mapping[str, tirx.PrimFunc]) -> Signature:
    """The signature of a lowered function, or of a plain PrimFunc that never was a stage-I one."""
    scheduled = stages.get("II scheduled")
    if scheduled is None:
        return Signature(stages["III"])
    func = scheduled.attrs[SIGNATURE]
    passed = {p.name for p in stages["III"].params}
    pairs = zip(scheduled.params, func.params, strict=True)
    absent = [str(argument.name) for param, argument in pairs if param.name not in passed]
    return Signature(func.with_attr(NOT_PASSED, absent))


def natural_shapes(func: tirx.PrimFunc) -> dict[str, tuple[str, list[ir.Expr]]]:
    """(argument name, natural shape) of each array parameter of a stage-II function, by buffer."""
    signature, rename = func.attrs[SIGNATURE], _renaming(func)
    space = PositionSpace(signature)
    shapes = [_shape(param, space.layouts, rename) for param in space.params]
    named = zip(func.params, signature.params, shapes, strict=True)
    return {v.name: (str(p.name), shape) for v, p, shape in named if shape is not None}


def changed_layout(func: tirx.PrimFunc) -> str:
    """A text about a parameter whose layout a schedule changed; "" for none."""
    signature, rename = func.attrs[SIGNATURE], _renaming(func)
    declared, layouts = PositionSpace(signature).params, func.attrs[LAYOUTS]
    for was, now, argument in zip(declared, func.params, signature.params, strict=True):
        if not tirx.is_buffer_var(now):
            continue
        layout = layouts.get(now.name)
        sizes = was.ty.shape
        if layout is not None and not layout.ends:
            # The lowered program's axes: one may stand for several of the caller's.
            sizes = map(positional_size, layout.axes)
        shape = [rename(size) for size in sizes]
        if was.ty.dtype != now.ty.dtype or not same_indices(shape, now.ty.shape):
            expected, got = (
                f"({', '.join(map(size_text, sizes))}) {ty.dtype}"
                for sizes, ty in ((shape, was.ty), (now.ty.shape, now.ty))
            )
            return (
                f"argument '{argument.name}': expected buffer '{now.name}' as {expected}, got {got}"
            )
    return ""


def _renaming(func: tirx.PrimFunc) -> Callable[[ir.Expr], ir.Expr]:
    """A substitution of a stage-II function's parameters for those of its attributes, by name."""
    by_name = {p.name: p for p in func.params}

    def rename(expr: ir.Expr) -> ir.Expr:
        return substitute(expr, {v: by_name[v.name] for v in _variables(expr) if v.name in by_name})

    return rename


def bound(
    caller: str, place: Mapping[str, int], args: Sequence[object], kwargs: Mapping[str, object]
) -> list[Any]:
    """Arguments in the order of `place`, the position by name; None for omitted ones."""
    if not args and len(kwargs) == len(place):
        try:
            return [*map(kwargs.__getitem__, place)]
        except KeyError:  # another name, which is refused below
            pass
    if len(args) > len(place):
        raise TypeError(
            f"{caller}: expected at most {len(place)} arguments ({', '.join(place)}), got "
            f"{len(args)}"
        )
    values = [*args, *([None] * (len(place) - len(args)))]
    for key, value in kwargs.items():
        position = place.get(key)
        if position is None:
            raise TypeError(f"{caller}: no argument '{key}'; there are {', '.join(place)}")
        if position < len(args):
            raise TypeError(f"{caller}: argument '{key}' is given twice")
        values[position] = value
    return values


def bound_by_name(
    caller: str, params: Sequence[str], args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, Any]:
    """Arguments by the names of parameters, without omitted ones."""
    values = bound(caller, {name: i for i, name in enumerate(params)}, args, kwargs)
    return {name: x for name, x in zip(params, values, strict=True) if x is not None}


class Arguments:
    """The caller's parameters of a kernel, with checks.

    count : their number
    arrays, scalars : their positions; outputs : positions of arrays that are written
    limits : for scalars that are passed on unchanged: position, type, minimum and maximum

    Messages name the function and the argument. Values are a list, in the parameters' order.
    """

    def __init__(self, name: str, signature: Signature, target: Target) -> None:
        self.name = name
        self.signature = signature
        self.count = len(signature.names)
        self._place = {name: i for i, name in enumerate(signature.names)}
        self.arrays = tuple(signature.arrays)
        self.scalars = tuple(signature.scalars)
        self.outputs = frozenset(signature.outputs)
        self._kind = "cpu" if "cpu" in target.keys else target.kind.name
        limits = [(i, _limits(signature.dtypes[i])) for i in self.scalars]
        self.limits = tuple((i, *limit) for i, limit in limits if limit is not None)

    def types(self, array: type) -> list[type | None]:
        """The types of values that need no conversion, if arrays are of type `array`."""
        kinds = dict.fromkeys(self.arrays, array) | {i: kind for i, kind, *_ in self.limits}
        return [kinds.get(i) for i in range(self.count)]

    def bind(self, args: Sequence[object], kwargs: Mapping[str, object]) -> list[Any]:
        """Values in order, None for omitted scalars."""
        values = bound(self.name, self._place, args, kwargs)
        for i in self.arrays:
            if values[i] is None:
                raise TypeError(f"{self.named(i)} is missing: expected an array")
        return values

    def complete(self, values: list[Any]) -> None:
        """Convert scalars to Python numbers; fill in those that the shapes of arrays imply."""
        for i in self.scalars:
            if values[i] is not None:
                values[i] = self._number(i, values[i])
        self.signature.infer(values)
        for i in self.scalars:
            if values[i] is None:
                for at in (at for at in self.arrays if values[at] is not PENDING):
                    self._refuse_kind(at, values[at])
                    if self.signature.shape_of(at, values, any_form=True) is None:
                        self._refuse_rank(at, values)
                raise TypeError(
                    f"{self.named(i)} is missing, and no array's shape implies it: expected a "
                    "number"
                )

    def _refuse_rank(self, at: int, values: list[Any]) -> None:
        ranks, shape = self.signature.forms[at], tuple(values[at].shape)
        raise ValueError(
            f"{self.named(at)}: expected {' or '.join(map(str, ranks))} dimensions "
            f"{self.signature.expected_text(at, values)}, got {len(shape)}: {shape}"
        )

    def refuse_broken_promise(self, values: list[object]) -> None:
        """Raise for a scalar that breaks a promise of the schedule."""
        named = {self.signature.names[i]: values[i] for i in self.scalars}
        check_promises(self.name, self.signature.promises, named)

    def refuse(self, values: list[Any]) -> None:
        """Raise if the arguments are invalid."""
        for i in self.scalars:
            values[i] = self._number(i, values[i])
        for i in self.arrays:
            self._refuse_kind(i, values[i])
        for i in self.arrays:
            array, caller = values[i], self.named(i)
            shape = [int(s) for s in array.shape]
            expected = self.signature.expected_shape(i, values, len(shape))
            if shape != expected:
                why = self.signature.unmet_promises(expected, shape)
                by = "" if why else self.signature.length_sources(i, expected, values)
                legal = self.signature.expected_text(i, values)
                raise ValueError(f"{caller}: expected shape {legal}{why}, got {(*shape,)}{by}")
            if not is_contiguous(array):
                raise ValueError(
                    f"{caller}: expected a contiguous array, got strides {strides(array)}"
                )
            if i in self.outputs and is_read_only(array):
                raise ValueError(f"{caller}: it is written, but the array is read-only")

    def named(self, at: int) -> str:
        """The beginning of a message about an argument."""
        return f"{self.name}: argument '{self.signature.names[at]}'"

    def _number(self, at: int, value: object) -> object:
        """Convert a scalar argument to a Python number; raise if it is not one or does not fit."""
        dtype = self.signature.dtypes[at]
        if dtype == "bool":
            if not isinstance(value, bool | np.bool_):
                raise TypeError(f"{self.named(at)}: expected a bool, got {_describe(value)}")
            return bool(value)
        if dtype.startswith("float"):
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                raise TypeError(f"{self.named(at)}: expected a number, got {_describe(value)}")
            return float(value)
        if not dtype.startswith(("int", "uint")):
            return value
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"{self.named(at)}: expected an integer, got {_describe(value)}")
        info = np.iinfo(dtype)
        if not info.min <= value <= info.max:
            raise ValueError(f"{self.named(at)}: expected a number that {dtype} holds, got {value}")
        return int(value)

    def _refuse_kind(self, at: int, array: object) -> None:
        """Raise unless the value is an array of the expected dtype and device."""
        caller, dtype = self.named(at), self.signature.dtypes[at]
        instead = hidden(array)
        if instead:
            raise TypeError(f"{caller}: expected {instead}")
        layout = getattr(array, "layout", None)
        if layout is not None and "strided" not in str(layout):
            raise TypeError(f"{caller}: expected a dense array of values or indices, got {layout}")
        if not is_array(array):
            raise TypeError(
                f"{caller}: expected a torch, NumPy or TVM array, got {type(array).__name__}"
            )
        kind = self._kind
        device = device_name(array)
        if kind == "cpu" and device != "cpu":
            raise ValueError(f"{caller}: expected an array on the CPU, got one on {device}")
        if kind == "cuda" and device != "cuda":
            raise ValueError(f"{caller}: expected an array on a CUDA device, got one on {device}")
        if dtype_name(array) != dtype:
            raise TypeError(f"{caller}: expected dtype {dtype}, got {dtype_name(array)}")


def _describe(value: object) -> str:
    return f"{type(value).__name__} {value!r}"


def _limits(dtype: str) -> tuple[type, float, float] | None:
    """Type, minimum and maximum of a scalar argument that is passed on unchanged."""
    if dtype == "bool":
        return bool, False, True
    if dtype.startswith("float"):
        return float, -math.inf, math.inf
    if dtype.startswith(("int", "uint")):
        info = np.iinfo(dtype)
        return int, int(info.min), int(info.max)
    return None
