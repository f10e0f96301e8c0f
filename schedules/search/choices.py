"""The config of a schedule that a user wrote, or that was made from a program."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any


class Choices(Mapping[str, Any]):
    """A value for each name of a space; to be read as a dict, equal by names and values.

    Values are None, booleans, numbers and texts. Without names it stands for no schedule of the
    search at all: the default one.

    >>> Choices({"tile": 2, "order": "rows"})["tile"]
    2
    """

    def __init__(self, values: Mapping[str, Any] = {}) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return f"Choices({self._values!r})"


def is_choice(value: Any) -> bool:
    """Whether a value may be among the choices: JSON gives it back as it is."""
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int | str)
