"""Checks of the fields of problems and configs, which are frozen dataclasses."""

from __future__ import annotations

from typing import Any

__all__ = ["expect", "expect_at_least", "expect_integers", "expect_one_of", "is_power_of_two"]


def expect(of: Any, argument: str, holds: bool, expected: str, *got: Any) -> None:
    """Raise ValueError where a field of a problem or config is not as expected.

    got : what the message shows; by default the field's value
    """
    if not holds:
        value = got[0] if got else getattr(of, argument)
        raise ValueError(
            f"{type(of).__name__}: argument '{argument}': expected {expected}, got {value!r}"
        )


def expect_integers(
    of: Any, *names: str, positive: bool = False, optional: tuple[str, ...] = ()
) -> None:
    """Raise ValueError where one of these fields is no integer of 32 bits.

    optional : names of those that may be None
    """
    for name in names:
        value = getattr(of, name)
        if value is None and name in optional:
            continue
        allowed = range(1 if positive else -(2**31), 2**31)
        fits = isinstance(value, int) and not isinstance(value, bool) and value in allowed
        expect(of, name, fits, "a positive integer" if positive else "an integer")


def expect_at_least(of: Any, **least: int) -> None:
    """Raise ValueError where one of these fields is less than it may be."""
    for name, value in least.items():
        expect(of, name, getattr(of, name) >= value, f"{value} or more")


def expect_one_of(of: Any, **allowed: tuple[str, ...]) -> None:
    """Raise ValueError where one of these fields is none of what is allowed."""
    for name, values in allowed.items():
        expect(of, name, getattr(of, name) in values, f"one of {', '.join(values)}")


def is_power_of_two(value: Any) -> bool:
    """Whether a value is an integer 1, 2, 4, ..."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole and value >= 1 and not value & (value - 1)
