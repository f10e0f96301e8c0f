"""What is said of an argument that is refused: by whom, which, what was expected, what came."""

from __future__ import annotations

from typing import TypeVar

E = TypeVar("E", bound=Exception)


def wrong(who: str, argument: str, expected: str, got: object, kind: type[E] = ValueError) -> E:
    """The error to raise for an argument of a function.

    got : text for what came, or a value whose text that is
    """
    return kind(f"{who}: argument '{argument}': expected {expected}, got {got}")
