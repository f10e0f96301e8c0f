"""The format of a single rule written by a user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sparsetir.formats.converted import ConvertedFormat
from sparsetir.formats.format import Format
from sparsetir.formats.make_rules import Operand
from sparsetir.formats.pattern import Pattern
from sparsetir.formats.rule import FormatRewriteRule


@dataclass(frozen=True)
class RuleFormat(Format):
    """A format of one rewrite rule, for the buffers and axes that it rewrites.

    When to use: there is a rule, and no other use of the format. A subclass of `Format` makes such
    rules for the buffers and axes of any program.

    Parameters
    ----------
    rule : FormatRewriteRule
        The rule.
    """

    order: ClassVar[int | None] = None

    rule: FormatRewriteRule

    @property
    def name(self) -> str:
        return self.rule.name

    @property
    def operand(self) -> Operand:
        """The buffers and axes that the rule rewrites."""
        desc = self.rule.new_format_desc
        idtype = desc.axis(self.rule.axes_after_rewrite[0]).idtype
        buffers = {b: desc.buffer(b).dtype for b in self.rule.buffers_to_rewrite}
        return Operand(buffers, tuple(self.rule.axes_before_rewrite), idtype)

    def rules(self, operand: Operand) -> list[FormatRewriteRule]:
        if operand != self.operand:
            raise ValueError(
                f"RuleFormat '{self.name}': argument 'operand': expected {self.operand}, which the "
                f"rule rewrites, got {operand}"
            )
        return [self.rule]

    def convert(self, pattern: Pattern, operand: Operand | None = None) -> ConvertedFormat:
        return super().convert(pattern, self.operand if operand is None else operand)
