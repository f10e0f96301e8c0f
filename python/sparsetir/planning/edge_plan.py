"""Plans of messages, softmax and attention along edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm

from sparsetir.planning.edge_request import EdgeRequest
from sparsetir.planning.run_plan import Plan
from sparsetir.records.lookup import by_record
from sparsetir.schedules.operators.problems import CsrPattern
from sparsetir.schedules.templates.message_tiles import config_of


def edge_plan(wanted: EdgeRequest, config: Any = None) -> Plan:
    """What :func:`sparsetir.plan` gives for operators along edges.

    config : None for what is recorded for this very problem, else for the one that sizes choose
    """
    if config is not None:
        return EdgePlan(wanted, config)
    pattern = isinstance(wanted.matrix, CsrPattern)  # to know it again takes time
    found = None
    if not pattern and not wanted.gpu:
        found = by_record(
            wanted.task(), lambda config: EdgePlan(wanted, config, "record"), config_of
        )
    return found or EdgePlan(wanted, wanted.chosen(), "default")


class EdgePlan(Plan):
    """A plan whose kernel may want arrays for its own use, new ones in each call."""

    def __init__(self, wanted: EdgeRequest, config: Any, chosen_by: str = "user") -> None:
        super().__init__(wanted, config, chosen_by)
        self._scratch = wanted.scratch
        if self._scratch:
            self._direct = []

    def _fill(self, args: list[Any], operands: tuple[Any, ...], values: Any, out: Any) -> None:
        super()._fill(args, operands, values, out)
        for name, (count, dtype) in self._scratch.items():
            made = tvm.runtime.empty((count,), dtype, self._device) if self._gpu else None
            args[self._place[name]] = np.empty(count, dtype) if made is None else made
