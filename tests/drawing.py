"""Random examples of tests: the same ones in each run, however long they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

COMMON: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}


def examples(few: int, many: int, each: str = "", among: Any = ("",), **drawn: Any) -> Any:
    """A test of random examples of a check: a few by default, many where slow tests run.

    each, among : a parameter of the check that each test has a value of
    drawn : what is drawn, by the check's other parameters
    """

    def of(check: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.slow)])
        @pytest.mark.parametrize("one", list(among))
        def test(one: str, count: int) -> None:
            @settings(max_examples=count, **COMMON)
            @given(**drawn)
            def all_of_them(**values: Any) -> None:
                check(**values, **({each: one} if each else {}))

            all_of_them()

        test.__doc__ = check.__doc__
        return test

    return of
