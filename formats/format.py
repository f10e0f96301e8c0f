"""The base class of formats: rules, and the coordinates that each of them stores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np

from sparsetir.formats.converted import ConvertedFormat
from sparsetir.formats.format_part import FormatPart
from sparsetir.formats.infer_indices import infer_format
from sparsetir.formats.make_rules import Operand
from sparsetir.formats.partition import check_partition
from sparsetir.formats.pattern import Pattern
from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.sparse_ir.index_arrays import INT32, is_integer
from sparsetir.sparse_ir.origins import note_origin


class Format(ABC):
    """A storage format for matrices or tensors. Subclasses are frozen dataclasses of parameters.

    A subclass defines `name` and `rules`, and `split` if it has more than one rule. The arrays are
    inferred from the rules; a format with a faster conversion overrides `infer`.
    """

    order: ClassVar[int | None] = 2  # of the tensors that it stores; None: any

    @property
    @abstractmethod
    def name(self) -> str:
        """An identifier that prefixes the names of its rules, such as `bsr_4_4`."""

    @abstractmethod
    def rules(self, operand: Operand) -> list[FormatRewriteRule]:
        """The rules, independent of the pattern: one compiled kernel serves all.

        Parameters
        ----------
        operand : Operand
            The buffers.

        Returns
        -------
        list of FormatRewriteRule
        """

    def labels(self, operand: Operand) -> list[str]:
        """The contents of each rule's part in words; by default the rule's name.

        Parameters
        ----------
        operand : Operand
            The buffers.

        Returns
        -------
        list of str
        """
        return [rule.name for rule in _rules(self, operand)]

    def split(self, pattern: Pattern) -> list[np.ndarray]:
        """The elements that each rule stores.

        Parameters
        ----------
        pattern : Pattern
            The stored coordinates.

        Returns
        -------
        list of ndarray
            Positions in the pattern, increasing, for each rule.
        """
        return [np.arange(pattern.nnz)]

    def places(self, pattern: Pattern) -> int:
        """The number of slots for a pattern, padding included.

        The library's formats count them without conversion.

        Parameters
        ----------
        pattern : Pattern
            The stored coordinates.

        Returns
        -------
        int
        """
        return sum(part.size for part in self.convert(pattern).parts)

    def infer(self, pattern: Pattern, rules: list[FormatRewriteRule]) -> list[FormatPart]:
        """The arrays of each rule.

        Parameters
        ----------
        pattern : Pattern
            The stored coordinates.
        rules : list of FormatRewriteRule
            The result of :meth:`rules`.

        Returns
        -------
        list of FormatPart
            Parts whose slots are assigned for all elements of the pattern.
        """
        if len(rules) == 1:
            return [infer_format(rules[0], pattern.coords, pattern.shape)]
        positions = list(self.split(pattern))
        if len(positions) != len(rules):
            raise ValueError(
                f"{self.name}: split: expected positions for each of {len(rules)} rules, got "
                f"{len(positions)}"
            )
        check_partition(pattern.coords, positions)
        parts = []
        for rule, at in zip(rules, positions, strict=True):
            part = infer_format(rule, [c[at] for c in pattern.coords], pattern.shape)
            parts.append(part.within(at, pattern.nnz))
        return parts

    def convert(self, pattern: Pattern, operand: Operand | None = None) -> ConvertedFormat:
        """Index arrays, masks, and slots of the elements of a pattern.

        Parameters
        ----------
        pattern : Pattern
            The stored coordinates.
        operand : Operand, optional
            The buffers; by default a float32 buffer A over I and J (I, J, K, L, ... ).

        Returns
        -------
        ConvertedFormat

        Raises
        ------
        ValueError
            For a pattern with another number of axes.
        StructureError
            If a coordinate is taken by no rule or by several, or if a rule has no slot for it;
            names the first one.
        """
        if self.order not in (None, pattern.order):
            raise ValueError(
                f"{self.name}: expected a pattern of {self.order} axes, got shape {pattern.shape}"
            )
        if operand is None:
            operand = Operand.default(pattern.order, idtype=pattern.idtype)
        elif len(operand.axes) != pattern.order:
            raise ValueError(
                f"{self.name}: argument 'operand': expected {pattern.order} axes, got "
                f"{list(operand.axes)}"
            )
        rules = list(_rules(self, operand))
        names = [r.name for r in rules]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"{self.name}: expected rules of different names, got {names}")
        pattern.check_range()
        parts = self.infer(pattern, rules)
        labels = dict(zip(names, self.labels(operand), strict=True))
        return ConvertedFormat(self.name, pattern, operand, parts, labels)


Choice = Callable[[Pattern], Sequence[Format]]


class Registered(NamedTuple):
    """A class of matrix formats with parameters that are data.

    small : an instance for pictures and tests, of some 20 rows; None for none
    library : returns those that the command line and the bench show for a pattern
    search : returns those worth measuring for a pattern
    """

    kind: type[Format]
    small: Format | None
    library: Choice
    search: Choice


REGISTRY: dict[str, Registered] = {}


def register(
    kind: type[Format],
    small: Format | None = None,
    *,
    library: Choice | None = None,
    search: Choice | None = None,
) -> None:
    """Register a class of formats for records of tuning, searches, lists, pictures and tests.

    Parameters
    ----------
    kind : type
        A class of matrix formats whose parameters are numbers, strings or tuples of these.
    small, library, search
        See :class:`Registered`; by default the small one is in the library, and the search covers
        those in the library.
    """
    library = library or (lambda _: [] if small is None else [small])
    note_origin(kind)
    REGISTRY[kind.__name__] = Registered(kind, small, library, search or library)


@lru_cache(maxsize=256)
def _rules(fmt: Format, operand: Operand) -> tuple[FormatRewriteRule, ...]:
    return tuple(fmt.rules(operand))


def positive(caller: str, argument: str, value: Any) -> int:
    """Check a parameter of a format: a positive integer that fits int32."""
    if not is_integer(value) or not 1 <= value <= INT32:
        most = " below 2**31" if is_integer(value) and value > 0 else ""
        raise ValueError(
            f"{caller}: argument '{argument}': expected a positive integer{most}, got {value!r}"
        )
    return int(value)


def set_positive(fmt: Format, *fields: str) -> None:
    """Check fields of a new format, and convert NumPy integers to int."""
    for field in fields:
        value = positive(type(fmt).__name__, field, getattr(fmt, field))
        object.__setattr__(fmt, field, value)
