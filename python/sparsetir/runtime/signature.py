"""What a kernel's callers see: parameters, the natural shapes of arrays, sizes that shapes imply.

The natural shape of a buffer over dense axes is their lengths. A buffer with sparse or ragged axes
is its values: one dimension for everything up to the last such axis, then the dense axes after it;
so (nnz,) for CSR and (blocks, b, b) for BSR.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import ir, tirx
from tvm.sym import Analyzer

from sparsetir.sparse_ir.computed import computed_parameters, of_values, reads
from sparsetir.sparse_ir.nodes import SparseFunc, make_func, substitute, walk
from sparsetir.sparse_ir.position_space import LAYOUTS, SIGNATURE, PositionSpace
from sparsetir.sparse_ir.promises import promises_of
from sparsetir.sparse_ir.storage import Storage
from sparsetir.sparse_ir.tir import dtype_of

# Attribute of a signature's function: computed parameters that the compiled function does not have.
NOT_PASSED = "not_passed"


@dataclass(frozen=True)
class Inference:
    """How a scalar follows from an array: shape[dim] - minus, divided by known scalars."""

    scalar: int
    array: int
    dim: int
    minus: int
    divide: tuple[int, ...]


class Signature:
    """Parameters of a kernel: first those that callers give, then the computed ones.

    func : the stage-I function without its body (its axes say how index arrays are checked)
    names : the parameters that callers give, in order
    computed : recipe and keywords of each computed parameter, by name, in the order in which they
        are made
    passed : what the compiled function takes, in order: `names`, then the computed parameters that
        it needs (the others are there for recipes alone, or are lengths of these)
    of_values : the passed ones that follow values, and are made in every call
    promises : what the schedule takes for granted about scalars
    position : place of each parameter by name, computed ones too
    shapes : natural shape of each array parameter, None for scalars
    dtypes : dtype of each parameter
    outputs : positions of the arrays that the kernel writes
    arrays, scalars : positions of what callers give
    index_arrays : positions of given indptr and indices, and of other arrays that recipes read
    index_sizes : positions of the given scalars that say what index arrays may hold, or that
        recipes read
    inferences : how given scalars follow from shapes
    constants : by position, scalars that no shape implies, and whose only value is promised
    """

    scalars: list[int]
    constants: dict[int, object]
    inferences: list[Inference]

    def __init__(self, func: SparseFunc) -> None:
        self.func = func
        self.source: Any = func
        self.params: list[Any] = list(func.params)
        self.name: str = func.name
        self.computed: dict[str, dict[str, Any]] = computed_parameters(func)
        self.promises: list[dict[str, Any]] = promises_of(func)
        self.position: dict[str, int] = {str(p.name): i for i, p in enumerate(func.params)}
        self.names: list[str] = [n for n in self.position if n not in self.computed]
        absent = (
            {str(n) for n in func.attrs[NOT_PASSED]} if NOT_PASSED in func.attrs else set[str]()
        )
        self.passed: list[str] = [n for n in self.position if n not in absent]
        self.of_values: list[str] = [n for n in of_values(func) if n not in absent]
        self.shapes: list[list[Any] | None] = [None] * len(self.params)
        self.dtypes: list[str] = ["handle"] * len(self.params)
        self._fill()
        written = {str(n) for n in func.attrs["outputs"]}
        self.outputs: list[int] = [i for i, n in enumerate(self.names) if n in written]
        given = range(len(self.names))
        self.arrays: list[int] = [i for i in given if self.shapes[i] is not None]
        self.scalars = [i for i in given if not isinstance(self.params[i].ty, ir.PointerType)]
        self._name_sizes()
        self._infer()

    def _name_sizes(self) -> None:
        """Notes which sizes are a given scalar or a number, as most are: its position, or ~number;
        None of others."""
        place = {self.params[i]: i for i in self.scalars}

        def named(size: Any) -> int | None:
            if isinstance(size, tirx.IntImm):
                return ~int(size)
            return place.get(size) if isinstance(size, ir.Var) else None

        self._named = [[named(size) for size in shape or []] for shape in self.shapes]

    def _fill(self) -> None:
        space = PositionSpace(self.func)
        by_buffer = {v.name: i for i, v in enumerate(space.params) if tirx.is_buffer_var(v)}
        for i, param in enumerate(self.func.params):
            if not isinstance(param.ty, ir.PointerType):
                self.dtypes[i] = dtype_of(param)
        for name, i in by_buffer.items():
            var = space.params[i]
            layout = space.layouts.get(name)
            shape = list(var.ty.shape) if layout is None else _storage(layout).natural_shape()
            self.shapes[i] = shape
            self.dtypes[i] = str(var.ty.dtype)
        follow_values = of_values(self.func)
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
        given = [str(name) for name in arrays if name not in self.computed]
        self.index_arrays: list[int] = [self.position[name] for name in dict.fromkeys(given)]
        self.index_sizes: list[int] = sorted(self.position[n] for n in sizes - self.computed.keys())

    def _infer(self) -> None:
        """How scalars that callers leave out follow from shapes, and from promises."""
        steps = self._inferences(set())
        implied = {step.scalar for step in steps}
        exact = {self.position[p["param"]]: p["value"] for p in self.promises if _is_exact(p)}
        self.constants = {i: n for i, n in exact.items() if i in self.scalars and i not in implied}
        self.inferences = self._inferences(set(self.constants)) if self.constants else steps

    def inferences_from(self, arrays: list[int]) -> list[Inference]:
        """Steps, in order, that give every scalar that the shapes of some arrays imply."""
        return self._inferences(set(), arrays)

    def _inferences(self, known: set[int], arrays: list[int] | None = None) -> list[Inference]:
        """Steps, in order, that give every scalar that the shapes and known scalars imply."""
        steps: list[Inference] = []
        progress = True
        while progress:
            progress = False
            for array in self.arrays if arrays is None else arrays:
                for dim, size in enumerate(self.shapes[array] or []):
                    step = self._solve(size, array, dim, known)
                    if step is not None and step.scalar not in known:
                        known.add(step.scalar)
                        steps.append(step)
                        progress = True
        return steps

    def _solve(self, size: Any, array: int, dim: int, known: set[int]) -> Inference | None:
        minus = 0
        if isinstance(size, tirx.Add) and isinstance(size.b, tirx.IntImm):
            size, minus = size.a, int(size.b)
        factors = _factors(size)
        if factors is None or any(f.name not in self.position for f in factors):
            return None
        places = [self.position[f.name] for f in factors]
        unknown = [p for p in places if p not in known]
        if len(unknown) != 1 or unknown[0] not in self.scalars:
            return None
        return Inference(unknown[0], array, dim, minus, tuple(p for p in places if p in known))

    def expected_shape(self, array: int, values: list[Any]) -> list[Any]:
        """Natural shape of an array argument with the scalars filled in, as ints or text."""

        def known(size: Any, at: int | None) -> int | str:
            if at is not None and at < 0:
                return ~at
            if at is not None and values[at] is not None:
                return int(values[at])
            numbers = {
                self.params[i]: tirx.IntImm(dtype_of(self.params[i]), int(values[i]))
                for i in self.scalars
                if values[i] is not None and self.dtypes[i].startswith(("int", "uint"))
            }
            found = Analyzer().simplify(substitute(size, numbers))
            return int(found) if isinstance(found, tirx.IntImm) else str(found)

        sizes = self.shapes[array] or []
        return [known(size, at) for size, at in zip(sizes, self._named[array], strict=True)]

    def why_exactly(self, expected: list[object], got: list[int]) -> str:
        """Which promises ask for the lengths of a shape that it has not; "" for none."""
        exact = {p["value"]: p["param"] for p in self.promises if _is_exact(p)}
        other = [e for e, g in zip(expected, got, strict=False) if e != g and e in exact]
        said = " and ".join(f"'{exact[n]}' is {n}" for n in dict.fromkeys(other))
        return f", as its schedule promises that {said}" if said else ""


def _is_exact(promise: dict[str, object]) -> bool:
    return promise["kind"] == "exact"


def _variables(expr: object) -> list[Any]:
    found: list[Any] = []
    if expr is not None:
        walk(expr, lambda n: found.append(n) if isinstance(n, ir.Var) else None)
    return found


def _factors(expr: Any) -> list[Any] | None:
    """The variables of a product; None when there is anything else in it."""
    if isinstance(expr, tirx.Cast):
        return _factors(expr.value)
    if isinstance(expr, ir.Var):
        return [expr]
    if isinstance(expr, tirx.Mul):
        a, b = _factors(expr.a), _factors(expr.b)
        return None if a is None or b is None else a + b
    return None


def _storage(layout: Any, rename: Any = lambda e: e) -> Storage:
    return Storage(layout, {}, rename)


def signature_of(stages: dict[str, Any]) -> Signature:
    """The signature of a lowered function, or of a plain PrimFunc that never was a stage-I one."""
    scheduled = stages.get("II scheduled")
    if scheduled is None:
        return PlainSignature(stages["III"])
    func = scheduled.attrs[SIGNATURE]
    there = {p.name for p in stages["III"].params}
    pairs = zip(scheduled.params, func.params, strict=True)
    absent = [str(argument.name) for param, argument in pairs if param.name not in there]
    return Signature(func.with_attr(NOT_PASSED, absent))


class PlainSignature(Signature):
    """Parameters of a PrimFunc without sparse structure."""

    def __init__(self, prim: tirx.PrimFunc) -> None:
        name = str(prim.attrs["global_symbol"]) if "global_symbol" in prim.attrs else "main"
        self.func: SparseFunc = make_func(name, [], [], [], tirx.Evaluate(0), {"outputs": []})
        self.source = prim
        self.params: list[Any] = list(prim.params)
        self.name = name
        self.names: list[str] = [str(p.name) for p in prim.params]
        self.passed: list[str] = self.names
        self.computed = {}
        self.of_values = []
        self.promises = []
        self.position: dict[str, int] = {n: i for i, n in enumerate(self.names)}
        is_array = [tirx.is_buffer_var(p) for p in prim.params]
        self.shapes = [
            list(p.ty.shape) if a else None for p, a in zip(prim.params, is_array, strict=True)
        ]
        self.dtypes: list[str] = [
            str(p.ty.dtype) if not isinstance(p.ty, ir.PointerType) else "handle"
            for p in prim.params
        ]
        self.index_arrays = []
        self.index_sizes = []
        written: set[str] = set()
        walk(prim.body, lambda n: written.add(n.buffer.name) if _is_store(n) else None)
        self.outputs: list[int] = [i for i, n in enumerate(self.names) if n in written]
        self.arrays: list[int] = [i for i, a in enumerate(is_array) if a]
        self.scalars = [i for i, a in enumerate(is_array) if not a]
        self._name_sizes()
        self._infer()


def _is_store(node: object) -> bool:
    return isinstance(node, tirx.BufferStore)


def natural_shapes(func: tirx.PrimFunc) -> dict[str, tuple[str, list[Any]]]:
    """(argument name, natural shape) of each array parameter of a stage-II function, by buffer."""
    signature = func.attrs[SIGNATURE]
    argument = {v.name: p.name for v, p in zip(func.params, signature.params, strict=True)}
    by_name = {p.name: p for p in func.params}

    def rename(expr: object) -> Any:
        return substitute(expr, {v: by_name[v.name] for v in _variables(expr) if v.name in by_name})

    layouts = {str(k): v for k, v in func.attrs[LAYOUTS].items()}
    out: dict[str, tuple[str, list[Any]]] = {}
    for var in func.params:
        if tirx.is_buffer_var(var):
            layout = layouts.get(var.name)
            shape = (
                list(var.ty.shape) if layout is None else _storage(layout, rename).natural_shape()
            )
            out[var.name] = (str(argument[var.name]), shape)
    return out
