"""Expressions of operands of known types: programs, kernels and results, kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from typing import Any, NamedTuple

import numpy as np

from sparsetir.data.sources import Stored
from sparsetir.data.sparse_tensor import SparseMatrix, SparseTensor
from sparsetir.expressions.assignments import Assignment, Term, assignments, domain
from sparsetir.expressions.checks import (
    HALVES,
    check_like,
    check_ranks,
    common_dtype,
    computed_in,
    sizes_of,
)  # fmt: skip
from sparsetir.expressions.contraction import contracted
from sparsetir.expressions.notation import Call, Statement, accesses, in_semiring, parse
from sparsetir.expressions.operands import Operand, idtype_of
from sparsetir.expressions.program import Program, program
from sparsetir.expressions.storage import Storage, csf_levels, storage
from sparsetir.expressions.unit import Bound, Unit, settled
from sparsetir.expressions.visits import drivers
from sparsetir.formats.pattern import Pattern
from sparsetir.runtime.arrays import dtype_name, is_torch, to_numpy
from sparsetir.runtime.refusals import wrong
from sparsetir.sparse_ir.nodes import SparseFunc

MOST_KEPT = 256  # expressions with kernels
MOST_BOUND = 8  # sets of patterns and shapes of each
LIKE = "PATTERN"  # the operand whose pattern a result has, where it is no other one


class Compiled:
    """An expression of operands of some types.

    statement : the expression
    forms : the storage of each operand by name
    dtype : of the result
    acc : the type that is computed in
    """

    def __init__(
        self, who: str, statement: Statement, forms: Mapping[str, Storage], dtype: str, acc: str,
        idtype: str, options: Options,
    ) -> None:  # fmt: skip
        self.who, self.statement, self.dtype, self.acc = who, statement, dtype, acc
        self.idtype, self.options, self.forms = idtype, options, dict(forms)
        self.like = like = options.like
        self.result_name = statement.result.name
        self.forms[self.result_name] = Storage(dtype, len(statement.result.indices))
        self.steps = assignments(statement, self.forms, like)
        self._units: dict[object, list[Unit]] = {}
        self._bound: dict[object, list[Bound]] = {}

    def units(self, steps: tuple[Assignment, ...], apart: bool) -> list[Unit]:
        """One program of all assignments; or one for each, of which gradients are derived."""
        key = steps, apart
        if key not in self._units:
            made = (
                self._apart(steps) if apart else [program(steps, self.forms, self.acc, self.idtype)]
            )
            self._units[key] = [Unit.of(p) for p in made]
        return self._units[key]

    def _apart(self, steps: tuple[Assignment, ...]) -> list[Program]:
        forms, out = dict(self.forms), []
        for step in steps:
            dtype = self.dtype if step is steps[-1] else self.acc
            name, rank = step.result.name, len(step.result.indices)
            forms[name] = Storage(dtype, rank)
            alone = replace(step, accumulates=False)
            out.append(program([alone], forms, self.acc, self.idtype))
            if step.like:
                of = forms[step.like.name]
                forms[name] = replace(of, dtype=dtype, pattern=of.pattern or step.like.name)
        return out

    def result(self, operands: Mapping[str, Operand], like: object = None, out: Any = None) -> Any:
        """The result of operands of these types.

        like : what the caller gave for a pattern
        """
        tensors = [x.values for x in operands.values() if type(x.values) is not np.ndarray]
        graded = False
        if tensors:
            import torch

            graded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if self.options.format is not None:
            made = self._assembled(operands)
            if not tensors:
                return made
            # Gradients are those at the pattern that was found.
            at = {**operands, LIKE: Operand(made.values, made.shape, self.dtype, made.pattern)}
            options = self.options._replace(format=None, like=LIKE)
            if graded:
                return compiled(self.who, self.statement.text, at, options).result(at)
            return _sparse(at[LIKE], torch.from_numpy(made.values), None)
        found = self._graded(operands) if graded else self._plain(operands, bool(tensors), out)
        return found if self.like is None else _sparse(operands[self.like], found, like)

    @cached_property
    def assembling(self) -> list[Unit]:
        """Programs of sparse results, which add up."""
        *before, last = self.steps
        value = reduce(lambda x, y: Call("+", (x, y)), [t.value for t in last.terms])
        parts = [replace(last, terms=(t,)) for t in last.terms]
        if not any(t.over for t in last.terms) and value is not None and last.op == "sum":
            where = domain(
                value, lambda x: self.forms[x.name].sparse if x.name in self.forms else False
            )
            if drivers(where, lambda x: None not in x.plain).exact:
                parts = [replace(last, terms=(Term(value, ()),))]
        made = [
            program([*before, p], self.forms, self.acc, self.idtype, assembled=True) for p in parts
        ]
        return [Unit.of(p) for p in made]

    def _assembled(self, operands: Mapping[str, Operand]) -> SparseMatrix:
        """A sparse result with the pattern that the programs visit."""
        shapes = {n: x.shape for n, x in operands.items()}
        sizes = sizes_of(self.who, self.statement, shapes)
        patterns = {n: x.pattern for n, x in operands.items() if x.pattern is not None}
        found: list[SparseMatrix] = []
        try:
            kernels = [(unit, unit.assembled) for unit in self.assembling]
        except ValueError as error:
            expected = f"a result whose rows are the first loop, {error}"
            raise wrong(self.who, "format", expected, repr(self.options.format)) from error
        for unit, kernel in kernels:
            known, kept = settled(unit, sizes, patterns, self.idtype)
            given = {n: known[n] for n in kernel.params if n in known}
            for param in unit.inputs:
                name, key = unit.values[param]
                x = operands[name].values
                x = to_numpy(x) if key is None else kept[key].values(to_numpy(x))
                given[param] = np.ascontiguousarray(x)
            made = kernel(**given)
            shape = tuple(sizes[n] for n in self.statement.result.plain)
            pattern = Pattern.from_csr(made.indptr, made.indices, shape, check=False)
            found.append(SparseMatrix.of_stored(Stored(pattern, made.values, None)))
        return found[0].add(*found[1:]) if len(found) > 1 else found[0]

    def _plain(self, operands: Mapping[str, Operand], torch: bool, out: Any) -> Any:
        """The result of one program."""
        (bound,) = self.bound(operands, False)
        values = []
        for name, param in bound.sources:
            x = operands[name].values
            if bound.unit.values[param][1] is not None:
                x = bound.ordered(param, x)
            if type(x) is not np.ndarray:
                x = x.detach().contiguous()
            elif not x.flags.c_contiguous:
                x = np.ascontiguousarray(x)
            values.append(x)
        out = bound.empty(torch) if out is None else out
        if self.statement.accumulates:
            out[...] = operands[self.result_name].values
        return bound.natural(bound(values, out))

    def _graded(self, operands: Mapping[str, Operand]) -> Any:
        """The result of tensors that want gradients, step by step."""
        import torch

        from sparsetir.expressions.autograd import run

        values = {n: torch.as_tensor(x.values) for n, x in operands.items()}
        patterns = {n: x.pattern for n, x in operands.items() if x.pattern is not None}
        found: Any = None
        for bound in self.bound(operands, True):
            inputs = [bound.ordered(param, values[n]).contiguous() for n, param in bound.sources]
            found = bound.natural(run(bound, patterns, inputs))
            values[bound.unit.values[bound.unit.result][0]] = found
        if self.statement.accumulates:
            found = found + torch.as_tensor(operands[self.result_name].values)
        return found

    def bound(self, operands: Mapping[str, Operand], apart: bool) -> list[Bound]:
        """The units for the patterns and shapes of operands; kept for the last ones."""
        key = apart, *[(id(x.pattern), x.shape) for x in operands.values()]
        found = self._bound.get(key)
        if found is None:
            patterns = [x.pattern for x in operands.values()]
            found = self._made(operands, apart)
            forget: Callable[[object], object] = lambda _: self._bound.pop(key, None)  # noqa: E731
            held = [weakref.ref(p, forget) for p in patterns if p is not None]
            for bound in found:
                bound.held = held
            if len(self._bound) >= MOST_BOUND:
                self._bound.pop(next(iter(self._bound)), None)
            self._bound[key] = found
        return found

    def _made(self, operands: Mapping[str, Operand], apart: bool) -> list[Bound]:
        shapes = {n: x.shape for n, x in operands.items()}
        sizes = sizes_of(self.who, self.statement, shapes)
        if self.like is not None:
            expected = tuple(sizes[n] for n in self.statement.result.plain)
            if shapes[self.like] != expected:
                raise wrong(self.who, "like", f"shape {expected}", shapes[self.like])
        patterns: dict[str, Pattern] = {
            n: x.pattern for n, x in operands.items() if x.pattern is not None
        }
        stored = {n: p.nnz for n, p in patterns.items()}
        units = self.units(contracted(self.steps, sizes, stored), apart)
        return [Bound(u, sizes, patterns, self.idtype) for u in units]


def _sparse(mask: Operand, values: Any, like: object) -> Any:
    """A sparse result with the pattern of an operand."""
    pattern = mask.pattern
    assert pattern is not None
    host: Any = values
    if isinstance(like, SparseTensor) and not is_torch(values):
        return like.with_values(values)
    if not is_torch(values):
        made = SparseMatrix if pattern.order == 2 else SparseTensor
        return made.of_stored(Stored(pattern, host, None))
    import torch as loaded

    torch: Any = loaded

    if pattern.order == 2:
        arrays = pattern.indptr, pattern.columns.astype(pattern.indptr.dtype)
        index = [torch.from_numpy(x) for x in arrays]
        return torch.sparse_csr_tensor(*index, values, pattern.shape, check_invariants=False)
    at = torch.from_numpy(np.stack(pattern.coords).astype(np.int64))
    return torch.sparse_coo_tensor(
        at, values, pattern.shape, is_coalesced=True, check_invariants=False
    )


class ExpressionPlan:
    """An expression of operands whose patterns and shapes are kept, as `sparsetir.plan` gives it.

    Call it with operands in place of those it was planned with, by name: arrays of the same shape
    and type; of a sparse operand its values, (nnz,), in the order of :attr:`SparseMatrix.values`.

    Parameters
    ----------
    compiled : Compiled
        The expression.
    operands : mapping of str to Operand
        What it was planned with, by name.
    like : object
        What was given for the result's pattern.

    Attributes
    ----------
    programs : list of SparseFunc
        What is computed, in order.
    """

    def __init__(self, compiled: Compiled, operands: Mapping[str, Operand], like: object) -> None:
        self._compiled, self._operands, self._like = compiled, dict(operands), like
        self.programs: list[SparseFunc] = [u.unit.func for u in compiled.bound(operands, False)]

    def __call__(self, *, out: Any = None, **values: Any) -> Any:
        """The result.

        Parameters
        ----------
        out : ndarray, optional
            Where a dense result is written.
        **values : arrays
            Operands by name; by default those of the plan.

        Returns
        -------
        ndarray, Tensor, SparseMatrix or SparseTensor
        """
        operands = self._operands
        if values:
            operands = dict(operands)
            for name, x in values.items():
                operands[name] = self._replaced(name, x)
        return self._compiled.result(operands, self._like, out)

    def _replaced(self, name: str, x: Any) -> Operand:
        """An operand with other values."""
        old = self._operands.get(name)
        if old is None:
            names = ", ".join(self._operands)
            raise TypeError(f"plan: argument '{name}': expected one of {names}")
        shape = tuple(getattr(x, "shape", ()))
        expected = old.shape if old.pattern is None else (old.pattern.nnz,)
        if shape != expected or (shape and dtype_name(x) != old.dtype):
            got = f"{shape} {getattr(x, 'dtype', type(x).__name__)}"
            raise wrong("plan", name, f"{expected} {old.dtype}", got)
        return old._replace(values=x if shape else np.asarray(x, old.dtype))

    def __repr__(self) -> str:
        return f"<sparsetir.ExpressionPlan {self._compiled.statement.text}>"


class Options(NamedTuple):
    """What callers say beside operands; as of :func:`sparsetir.einsum`, `like` by name.

    formats : pairs of operands and formats
    """

    reduce: str = "sum"
    semiring: str = "plus_times"
    like: str | None = None
    format: str | None = None
    formats: tuple[tuple[str, object], ...] = ()


_all: dict[object, Compiled] = {}


def compiled(who: str, text: str, operands: Mapping[str, Operand], options: Options) -> Compiled:
    """The programs of an expression for operands of these types, kept."""
    shared: dict[int, str] = {}
    types = tuple([
        (n, x.dtype, len(x.shape), x.constant,
         None if x.pattern is None else shared.setdefault(id(x.pattern), n))
        for n, x in operands.items()
    ])  # fmt: skip
    idtype = idtype_of(operands.values())
    key = text, options, types, idtype
    found = _all.get(key)
    if found is None:
        found = _made(who, text, operands, options, shared, idtype)
        if len(_all) >= MOST_KEPT:
            _all.pop(next(iter(_all)), None)
        _all[key] = found
    return found


def _made(
    who: str, text: str, operands: Mapping[str, Operand], options: Options,
    shared: Mapping[int, str], idtype: str,
) -> Compiled:  # fmt: skip
    ranks = {n: len(x.shape) for n, x in operands.items()}
    parsed = parse(text, who, [r for n, r in ranks.items() if n != LIKE])
    statement = in_semiring(parsed, options.reduce, options.semiring, who)
    check_ranks(who, statement, ranks)
    if options.like is not None:
        check_like(who, statement, ranks[options.like])
    read = [operands[n] for n in dict.fromkeys(x.name for x in accesses(statement.value))]
    constants = [x.dtype for x in read if x.constant]
    dtype = common_dtype([x.dtype for x in read if not x.constant], constants)
    acc = computed_in(statement, dtype)
    forms: dict[str, Storage] = {}
    chosen = dict(options.formats)
    for n, x in operands.items():
        forms[n] = Storage(x.dtype, ranks[n])
        if x.pattern is not None and n in chosen:
            forms[n] = storage(who, n, chosen[n], ranks[n], x.dtype)
        elif x.pattern is not None:
            other = shared[id(x.pattern)]
            pattern = None if other == n or other in chosen else other
            forms[n] = replace(forms[n], levels=csf_levels(ranks[n]), pattern=pattern)
    if options.format is not None and (statement.accumulates or options.like):
        raise wrong(who, "format", "None beside `like` and +=", repr(options.format))
    if options.format not in (None, "csr"):
        raise wrong(who, "format", "'csr', or None for a dense result", repr(options.format))
    if options.format and len(statement.result.indices) != 2:
        expected = "a result with two indices"
        raise wrong(who, "format", expected, f"{statement.result}; give `like` instead")
    result = dtype if dtype in HALVES else acc
    return Compiled(who, statement, forms, result, acc, idtype, options)


def named(
    who: str, text: str, operands: Sequence[Operand], more: Mapping[str, Operand]
) -> dict[str, Operand]:
    """The operands by their names in a text; the first ones are in order of appearance."""
    ranks = tuple(len(x.shape) for x in operands)
    names = _names_of(who, text, () if "=" in text else ranks)
    free = [n for n in names if n not in more]
    if len(operands) > len(free):
        got = len(operands) + len(more)
        raise TypeError(f"{who}: expected {len(names)} operands ({', '.join(names)}), got {got}")
    out = dict(zip(free, operands, strict=False))
    for name, x in more.items():
        if name not in names:
            raise TypeError(
                f"{who}: argument '{name}': expected one of {', '.join(names)}, which are "
                f"the names of the operands in {text!r}"
            )
        out[name] = x
    for name in names:
        if name not in out:
            raise TypeError(
                f"{who}: argument '{name}': expected the operand of this name, got none"
            )
    return out


_names: dict[object, tuple[str, ...]] = {}


def _names_of(who: str, text: str, ranks: tuple[int, ...]) -> tuple[str, ...]:
    """The operands of a text, in order of appearance."""
    found = _names.get((text, ranks))
    if found is None:
        statement = parse(text, who, ranks)
        names = dict.fromkeys(x.name for x in accesses(statement.value))
        if statement.accumulates:
            names[statement.result.name] = None
        if len(_names) >= MOST_KEPT:
            _names.pop(next(iter(_names)), None)
        found = _names[text, ranks] = tuple(names)
    return found
