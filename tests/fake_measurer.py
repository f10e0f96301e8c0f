"""A measurer that measures nothing: seconds are a function of the config."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from typing import Any

from sparsetir.records.task import Outcome, Reference
from sparsetir.schedules.search.configs import to_data
from sparsetir.tuning import search


def text(config: Any) -> str:
    """A line that describes a config: equal for equal configs."""
    return json.dumps(to_data(config), sort_keys=True)


def seconds_of(config: Any) -> float:
    """A pseudo-random time between 1 and 2 ms, always the same for a config."""
    digest = hashlib.sha256(text(config).encode()).digest()
    return 1e-3 + int.from_bytes(digest[:4], "little") / 2**32 * 1e-3


class FakeMeasurer:
    """`log`: configs in the order in which they were measured, by all measurers of a fixture.

    references : what each was measured in turns with
    """

    log: list[str]
    references: list[Reference | None]
    measure_one: Callable[[Any], Outcome]
    delay = 0.0
    options: list[dict[str, Any]]

    def __init__(self, task: Any, **options: Any) -> None:
        self.options.append(options)

    def measure(
        self, config: Any, best: float | None = None, reference: Reference | None = None
    ) -> Outcome:
        type(self).log.append(text(config))
        type(self).references.append(reference)
        time.sleep(self.delay)
        return type(self).measure_one(config)

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass

    def __enter__(self) -> FakeMeasurer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def install(monkeypatch: Any, measure_one: Any = None, delay: float = 0.0) -> type[FakeMeasurer]:
    """Let `tune` measure by a function config -> Outcome, by default `seconds_of`."""

    def measured(config: Any) -> Outcome:
        return Outcome("ok", seconds=seconds_of(config))

    body = {
        "log": [], "references": [], "options": [], "delay": delay,
        "measure_one": staticmethod(measure_one or measured),
    }  # fmt: skip
    fake = type("Fake", (FakeMeasurer,), body)
    monkeypatch.setattr(search, "Measurer", fake)
    return fake
