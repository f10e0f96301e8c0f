"""Plans of relational gather-matmul-scatter: by records of tuning, with features of any number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparsetir.planning.relational_request import RelationalRequest
from sparsetir.planning.run_plan import Plan
from sparsetir.records.lookup import by_record
from sparsetir.runtime.arrays import empty_like, is_array, leading, with_zeros
from sparsetir.schedules.search.choose_rgms import config_of


def relational_plan(wanted: RelationalRequest, config: Any = None) -> Plan:
    """What :func:`sparsetir.plan` gives for "rgms".

    config : None for what is recorded for this very problem, else for the one that sizes choose
    """
    if config is not None:
        return _plan(wanted, config, "user")
    found = None
    if wanted.is_tuned:
        found = by_record(wanted.task(), lambda config: _plan(wanted, config, "record"), config_of)
    return found or _plan(wanted, wanted.whole.chosen(), "default")


def _plan(wanted: RelationalRequest, config: Any, chosen_by: str) -> Plan:
    """A plan for the sizes that a config is for."""
    whole = wanted.whole
    padded = whole.sizes != wanted.sizes
    if padded and (whole.feat_in, whole.feat) == (config.feat_in, config.feat):
        return PaddedPlan(wanted, whole, config, chosen_by)
    return Plan(wanted, config, chosen_by)


class PaddedPlan(Plan):
    """A plan whose kernel has more features than are given: zeros are put behind these.

    Operands, and results, are copied in each run where their features are not those of the kernel.
    """

    def __init__(
        self, wanted: RelationalRequest, whole: RelationalRequest, config: Any, chosen_by: str
    ) -> None:
        super().__init__(whole, config, chosen_by)
        self.feat, self._given = wanted.feat, wanted.shapes

    def __call__(self, *operands: Any, out: Any = None, values: Any = None) -> Any:
        """As of :class:`Plan`."""
        if len(operands) != len(self._operands):
            return super().__call__(*operands)  # which says what is wrong
        given = [*zip(self._operands, operands, strict=True)]
        for name, array in given if out is None else [*given, ("out", out)]:
            if not is_array(array) or tuple(array.shape) != self._given[name]:
                raise ValueError(
                    f"{self.op}: argument '{name}': expected an array of shape "
                    f"{self._given[name]}, got {getattr(array, 'shape', type(array).__name__)}"
                )
        self._check_memory(operands, values, out)
        whole = out
        if out is not None:
            self._refuse_overlap(out, operands, values)
            whole = empty_like(out, self._shapes["out"], f"{self.op}: argument 'out'")
        found = super().__call__(*self._padded(operands), out=whole, values=values)
        return leading(found, self._given["out"], out)

    def run_trusted(self, operands: Sequence[Any], values: Any = None) -> Any:
        """As of :class:`Plan`."""
        return leading(super().run_trusted(self._padded(operands), values), self._given["out"])

    def _run_detached(self, operands: Sequence[Any], values: Any) -> Any:
        plain = [x.detach() for x in operands]
        return super().__call__(*plain, values=None if values is None else values.detach())

    def _padded(self, operands: Sequence[Any]) -> list[Any]:
        named = zip(self._operands, operands, strict=True)
        return [with_zeros(array, self._shapes[name]) for name, array in named]
