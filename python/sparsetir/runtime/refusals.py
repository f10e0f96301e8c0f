"""Error messages for refused arguments: function, argument, expectation, and actual value."""

from __future__ import annotations

from typing import TypeVar

E = TypeVar("E", bound=Exception)


def wrong(caller: str, argument: str, expected: str, got: object, kind: type[E] = ValueError) -> E:
    """Make the error to raise for an argument of a function.

    got : the actual value, or a text that describes it
    """
    return kind(f"{caller}: argument '{argument}': expected {expected}, got {got}")
