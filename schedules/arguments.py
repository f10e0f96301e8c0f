"""Fields of configs and problems, which are frozen dataclasses: their declarations and checks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any


def expect(of: Any, argument: str, holds: bool, expected: str, *got: Any) -> None:
    """Raise ValueError if a field of a problem or config is not as expected.

    got : the values that the message shows; by default the field's
    """
    if not holds:
        value = got[0] if got else getattr(of, argument)
        raise ValueError(
            f"{type(of).__name__}: argument '{argument}': expected {expected}, got {value!r}"
        )


def expect_integer(of: Any, name: str) -> None:
    """Raise ValueError if one of the fields is not a 32-bit integer."""
    value = getattr(of, name)
    whole = isinstance(value, int) and not isinstance(value, bool)
    expect(of, name, whole and value in range(-(2**31), 2**31), "an integer")


def expect_at_least(of: Any, **least: int) -> None:
    """Raise ValueError if one of these fields is below its minimum."""
    for name, value in least.items():
        expect(of, name, getattr(of, name) >= value, f"{value} or more")


def expect_one_of(of: Any, **allowed: Collection[str]) -> None:
    """Raise ValueError if the value of one of these fields is not allowed."""
    for name, values in allowed.items():
        expect(of, name, getattr(of, name) in values, f"one of {', '.join(values)}")


def is_power_of_two(value: Any) -> bool:
    """Whether a value is an integer 1, 2, 4, ..."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole and value >= 1 and not value & (value - 1)


def number(
    default: Any = MISSING, *, least: int | None = 1, most: int | None = None, power: bool = False,
    optional: bool = False, compiled: int | None = None, tries: Sequence[Any] = (),
) -> Any:  # fmt: skip
    """An integer field of a :class:`Config`, with its allowed values.

    least, most : bounds; None for no bound
    power : whether it must be a power of two
    optional : whether it may be None
    compiled : the value at and above which kernels are the same
    tries : the values that a search tries
    """
    says = {"range": (least, most), "power": power, "optional": optional, "compiled": compiled}
    return field(default=default, metadata={"number": says, "tries": tries})


def choice(default: Any, *tries: Any) -> Any:
    """A field of a :class:`Config` that is not a number; a search tries its default and `tries`."""
    return field(default=default, metadata={"tries": (default, *tries)})


@dataclass(frozen=True)
class Config:
    """The choices of a kernel: a frozen dataclass whose integer fields declare their bounds."""

    def __post_init__(self) -> None:
        """Raise ValueError if a number is out of bounds."""
        for name, says in self._numbers().items():
            value, (least, most) = getattr(self, name), says["range"]
            if value is None and says["optional"]:
                continue
            wanted = "None, or " if says["optional"] else ""
            if says["power"]:
                wanted += "a power of two" if most is None else f"a power of two up to {most}"
                expect(
                    self, name, is_power_of_two(value) and (most is None or value <= most), wanted
                )
                continue
            expect_integer(self, name)
            wanted += f"{least} or more" if most is None else f"{least} to {most}"
            fits = (least is None or least <= value) and (most is None or value <= most)
            expect(self, name, fits, wanted)

    def _numbers(self) -> dict[str, Any]:
        return {f.name: f.metadata["number"] for f in fields(self) if "number" in f.metadata}

    def tries(self, **more: Iterable[Any]) -> dict[str, tuple[Any, ...]]:
        """For each field its value here, then those that a search tries, with `more`."""
        values = {
            f.name: (*f.metadata.get("tries", ()), *more.get(f.name, ())) for f in fields(self)
        }
        return {name: tuple(dict.fromkeys((getattr(self, name), *x))) for name, x in values.items()}

    @property
    def compiled(self) -> Any:
        """The fields on which the kernel's code depends."""
        most = {name: says["compiled"] for name, says in self._numbers().items()}
        open_ = {name: n for name, n in most.items() if n is not None}
        return replace(self, **{n: min(getattr(self, n), most) for n, most in open_.items()})

    def tiles(self, feat: int) -> int:
        """Tiles of `feat` features, 1 by default; raises ScheduleError for unsupported numbers."""
        del feat
        return 1
