"""The errors that sparsetir raises; each says what was expected and what was given."""

from __future__ import annotations


class IllFormedError(ValueError):
    """A stage-I function breaks a rule of the language; the message carries file and line."""


class LoweringError(ValueError):
    """A well-formed program that cannot be lowered as it stands."""


class ScheduleError(ValueError):
    """A schedule primitive or the default schedule that cannot be applied."""


class StructureError(ValueError):
    """Arrays that describe a sparse structure (indptr, indices) are not valid."""


class StructureIndexError(StructureError, IndexError):
    """A coordinate in `indices` is outside of its axis."""


class StructureTypeError(StructureError, TypeError):
    """An argument that describes a structure is missing, or of the wrong type."""


def describe(value: object) -> str:
    """Describe a value for a message: strings and numbers as they are, others by their type."""
    return f"{value!r}" if isinstance(value, str | int | float) else type(value).__name__
