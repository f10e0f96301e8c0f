"""Cached programs of expressions, for operands of known types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from math import inf
from typing import NamedTuple

from sparsetir.expressions.assignments import Assignment, Term, assignments, domain
from sparsetir.expressions.checks import (
    HALVES,
    check_format,
    check_like,
    check_ranks,
    check_sums,
    common_dtype,
    computed_in,
)  # fmt: skip
from sparsetir.expressions.contraction import may_be_contracted
from sparsetir.expressions.invariants import may_be_hoisted
from sparsetir.expressions.notation import in_semiring, parse
from sparsetir.expressions.operands import Operand, idtype_of
from sparsetir.expressions.program import Program, program
from sparsetir.expressions.storage import Storage, csf_levels, result_storage, storage
from sparsetir.expressions.trees import Access, Call, Statement, accesses
from sparsetir.expressions.unit import Unit
from sparsetir.expressions.visits import drivers

MOST_KEPT = 256  # expressions with kernels
MOST_FIXED = 4  # sets of fixed sizes per expression
LARGEST_FIXED = 1024
Sizes = tuple[tuple[str, int], ...]
# Factors of a product up to which all orders of contractions are tried, by `optimize`.
MOST_TRIED: dict[bool | str, float] = {True: 6, False: 0, "greedy": 0, "optimal": inf}
LIKE = "PATTERN"  # the name of a result's pattern that is not an operand


class Options(NamedTuple):
    """Options of :func:`sparsetir.einsum`, with `like` by name and pairs for `formats`.

    computed : whether the pattern of `like` is the one that the expression gives
    """

    reduce: str = "sum"
    semiring: str = "plus_times"
    like: str | None = None
    format: object = None
    formats: tuple[tuple[str, object], ...] = ()
    optimize: bool | str = True
    computed: bool = False


class Compiled:
    """An expression for operands of given types.

    statement : the expression
    forms : the storage of each operand by name
    dtype : the type of the result
    acc : the type of computations
    """

    def __init__(
        self, caller: str, statement: Statement, forms: Mapping[str, Storage], dtype: str, acc: str,
        idtype: str, options: Options,
    ) -> None:  # fmt: skip
        self.caller, self.statement, self.dtype, self.acc = caller, statement, dtype, acc
        self.idtype, self.options, self.forms = idtype, options, dict(forms)
        self.like = like = options.like
        self.result_name = statement.result.name
        rank, format = len(statement.result.indices), options.format
        self.forms[self.result_name] = Storage(dtype, rank)
        self.open_form = None if format is None else result_storage(caller, format, rank, dtype)
        if format is not None and (known := self._same_pattern()):
            self.like = like = known
            self.open_form = None
        self.steps = assignments(statement, self.forms, like)
        self.steps[-1] = replace(self.steps[-1], computed=options.computed)
        self._units: dict[object, list[Unit]] = {}
        self._fixed: set[Sizes] = set()

    def _same_pattern(self) -> str | None:
        """The operand that stores exactly the elements of the sparse result, so that none are
        assembled; None if there is none."""

        def sparse(x: Access) -> bool:
            return x.name in self.forms and self.forms[x.name].sparse

        steps = assignments(self.statement, self.forms)
        where = {x for t in steps[-1].terms for s in domain(t.value, sparse) for x in s or [None]}
        (access, *others) = where
        if others or access is None or access.indices != self.statement.result.indices:
            return None
        plain = access.plain
        if None in plain or len(set(plain)) < len(plain):
            return None
        return access.name if self.forms[access.name].levels == csf_levels(len(plain)) else None

    def fixed(self, sizes: Mapping[object, int]) -> Sizes:
        """Sizes to compile in: those of features, which are indices of no sparse operand.

        A kernel for any sizes has many versions, and takes several times as long to compile. It is
        used for further sizes once there are kernels for MOST_FIXED.
        """
        read = [x for s in self.steps for t in s.terms for x in accesses(t.value)]
        read += [s.like for s in self.steps if s.like]
        sparse = [x for x in read if x.name in self.forms and self.forms[x.name].sparse]
        others = {name for x in sparse for index in x.indices for name, _ in index.terms}
        features = tuple([
            (n, size) for n, size in sizes.items()
            if sparse and isinstance(n, str) and n not in others and 1 < size <= LARGEST_FIXED
        ])  # fmt: skip
        if features in self._fixed or len(self._fixed) < MOST_FIXED:
            self._fixed.add(features)
            return features
        return ()

    @cached_property
    def may_be_split(self) -> bool:
        """Whether there may be more steps for some sizes, which are compared for each pattern."""
        return may_be_hoisted(self.steps) or may_be_contracted(self.steps)

    def units(self, steps: tuple[Assignment, ...], fixed: Sizes, apart: bool) -> list[Unit]:
        """One program for all assignments; if `apart`, one for each, to derive gradients from."""
        key = steps, fixed, apart
        if key not in self._units:
            forms, sizes = self.forms, dict(fixed)
            programs = (
                self._by_step(steps, sizes) if apart
                else [program(steps, forms, self.acc, self.idtype, fixed=sizes)]
            )  # fmt: skip
            self._units[key] = [Unit.of(p) for p in programs]
        return self._units[key]

    def _by_step(self, steps: tuple[Assignment, ...], sizes: Mapping[str, int]) -> list[Program]:
        forms, out = dict(self.forms), []
        for step in steps:
            dtype = self.dtype if step is steps[-1] else self.acc
            name, rank = step.result.name, len(step.result.indices)
            forms[name] = Storage(dtype, rank)
            alone = replace(step, accumulates=False)
            out.append(program([alone], forms, self.acc, self.idtype, fixed=sizes))
            if step.like:
                of = forms[step.like.name]
                forms[name] = replace(of, dtype=dtype, pattern=of.pattern or step.like.name)
        return out

    @cached_property
    def whole(self) -> Unit:
        """One program of the sparse result, which adds one term after the other."""
        return self._assembling(self.steps)

    @cached_property
    def together(self) -> Unit | None:
        """The program that co-iterates all terms, if none is a reduction and they determine what is
        visited."""
        *before, last = self.steps
        if len(last.terms) == 1 or last.op != "sum" or any(t.over for t in last.terms):
            return None
        value = reduce(lambda x, y: Call("+", (x, y)), [t.value for t in last.terms])
        where = domain(
            value, lambda x: self.forms[x.name].sparse if x.name in self.forms else False
        )
        if not drivers(where, lambda x: None not in x.plain).exact:
            return None
        return self._assembling([*before, replace(last, terms=(Term(value, ()),))])

    def _assembling(self, steps: Sequence[Assignment]) -> Unit:
        form = self.open_form
        assert form is not None
        forms = {**self.forms, self.result_name: replace(form, order=None)}
        return Unit.of(program(steps, forms, self.acc, self.idtype, assembled=True))


_all: dict[object, Compiled] = {}


def compiled(caller: str, text: str, operands: Mapping[str, Operand], options: Options) -> Compiled:
    """The programs of an expression for operands of these types, cached."""
    shared: dict[int, str] = {}
    types = tuple([
        (n, x.dtype, len(x.shape), x.constant, x.steady,
         None if x.pattern is None else shared.setdefault(id(x.pattern), n))
        for n, x in operands.items()
    ])  # fmt: skip
    idtype = idtype_of(operands.values())
    key = text, options, types, idtype
    expression = _all.get(key)
    if expression is None:
        expression = _new(caller, text, operands, options, shared, idtype)
        if len(_all) >= MOST_KEPT:
            _all.pop(next(iter(_all)), None)
        _all[key] = expression
    return expression


def typed(
    caller: str, text: str, operands: Mapping[str, Operand], options: Options
) -> tuple[Statement, str, str]:
    """The statement for these operands, the type of its result, and that of computations."""
    ranks = {n: len(x.shape) for n, x in operands.items()}
    parsed = parse(text, caller, [r for n, r in ranks.items() if n != LIKE])
    statement = in_semiring(parsed, options.reduce, options.semiring, caller)
    check_ranks(caller, statement, ranks)
    check_sums(caller, statement)
    if options.like is not None:
        check_like(caller, statement, ranks[options.like])
    read = [operands[n] for n in dict.fromkeys(x.name for x in accesses(statement.value))]
    constants = [x.dtype for x in read if x.constant]
    dtype = common_dtype([x.dtype for x in read if not x.constant], constants)
    acc = computed_in(statement, dtype)
    check_format(caller, statement, options.format, options.like)
    return statement, dtype if dtype in HALVES else acc, acc


def _new(
    caller: str, text: str, operands: Mapping[str, Operand], options: Options,
    shared: Mapping[int, str], idtype: str,
) -> Compiled:  # fmt: skip
    statement, result, acc = typed(caller, text, operands, options)
    ranks = {n: len(x.shape) for n, x in operands.items()}
    forms: dict[str, Storage] = {}
    chosen = dict(options.formats)
    for n, x in operands.items():
        forms[n] = Storage(x.dtype, ranks[n])
        if x.pattern is not None and n in chosen:
            forms[n] = storage(caller, n, chosen[n], ranks[n], x.dtype)
        elif x.pattern is not None:
            other = shared[id(x.pattern)]
            pattern = None if other == n or other in chosen else other
            levels, changing = csf_levels(ranks[n]), not x.steady
            forms[n] = replace(forms[n], levels=levels, pattern=pattern, changing=changing)
    return Compiled(caller, statement, forms, result, acc, idtype, options)
