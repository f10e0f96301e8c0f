"""What a format is: its rules, and which coordinate each of them takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import ClassVar

import numpy as np

from sparsetir.formats.converted import ConvertedFormat
from sparsetir.formats.describe import Operand
from sparsetir.formats.infer import infer_format
from sparsetir.formats.inferred import InferredFormat
from sparsetir.formats.partition import check_partition
from sparsetir.formats.pattern import Pattern
from sparsetir.formats.rule import FormatRewriteRule

__all__ = ["Format", "check_positive"]


class Format(ABC):
    """A way to store a matrix or tensor. Subclasses are frozen dataclasses of their parameters.

    A subclass gives `name` and `rules`, and `split` if it has more than one rule. That is all: the
    arrays are inferred from the rules. One that knows a faster way overrides `infer`.
    """

    order: ClassVar[int | None] = 2  # of the tensors it stores; None: any

    @property
    @abstractmethod
    def name(self) -> str:
        """An identifier that begins the names of its rules, such as `bsr_4_4`."""

    @abstractmethod
    def rules(self, operand: Operand) -> list[FormatRewriteRule]:
        """The rules, which do not depend on what is stored: one compiled kernel serves all."""

    def split(self, pattern: Pattern) -> list[np.ndarray]:
        """For each rule the positions, increasing, of the elements that it takes."""
        return [np.arange(pattern.nnz)]

    def infer(self, pattern: Pattern, rules: list[FormatRewriteRule]) -> list[InferredFormat]:
        """For each rule its arrays; every part is of all elements of the pattern."""
        if len(rules) == 1:
            return [infer_format(rules[0], pattern.coords, pattern.shape)]
        positions = self.split(pattern)
        check_partition(pattern.coords, positions)
        found = []
        for rule, at in zip(rules, positions, strict=True):
            part = infer_format(rule, [c[at] for c in pattern.coords], pattern.shape)
            found.append(part.within(at, pattern.nnz))
        return found

    def convert(self, pattern: Pattern, operand: Operand | None = None) -> ConvertedFormat:
        """Index arrays, masks and places of the elements of a pattern.

        operand : what is stored; by default a float32 buffer A over I and J (I, J, K, L, ... )

        Raises ValueError for a pattern of another order, and StructureError with the first
        coordinate that no rule takes, that several do, or for which a rule has no room.
        """
        if self.order not in (None, pattern.order):
            raise ValueError(
                f"{self.name}: expected a pattern of {self.order} axes, got shape {pattern.shape}"
            )
        if operand is None:
            operand = Operand(axes=tuple("IJKLMNOP"[: pattern.order]), idtype=pattern.idtype)
        elif len(operand.axes) != pattern.order:
            raise ValueError(
                f"{self.name}: argument 'operand': expected {pattern.order} axes, got "
                f"{list(operand.axes)}"
            )
        rules = list(_rules(self, operand))
        parts = self.infer(pattern, rules)
        return ConvertedFormat(self.name, pattern, operand, parts)


@lru_cache(maxsize=256)
def _rules(fmt: Format, operand: Operand) -> tuple[FormatRewriteRule, ...]:
    return tuple(fmt.rules(operand))


def check_positive(who: str, **sizes: int) -> None:
    """Refuse a parameter of a format that is no positive integer."""
    for argument, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(
                f"{who}: argument '{argument}': expected a positive integer, got {value!r}"
            )
