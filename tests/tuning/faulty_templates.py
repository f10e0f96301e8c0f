"""Templates that do what none may do, for SpMM on a CPU; also an example of a plug-in module."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsetir.schedules.operators.problems import Arranged, CsrPattern, Spmm, Stored
from sparsetir.schedules.operators.spmm import program
from sparsetir.schedules.template import Template, register
from sparsetir.schedules.templates import row_tile

RIGHT = row_tile.RowTile(tile=16, lanes=16)


@dataclass(frozen=True)
class _Like:
    """A config whose kernel is that of RIGHT."""

    @property
    def compiled(self) -> Any:
        return RIGHT.compiled

    def tiles(self, feat: int) -> int:
        return RIGHT.tiles(feat)


@dataclass(frozen=True)
class Crashing(_Like):
    """Reads a null pointer."""

    words: str = ""


@dataclass(frozen=True)
class Hanging(_Like):
    """Never ends."""


@dataclass(frozen=True)
class Wrong(_Like):
    """Adds one to the values."""


@dataclass(frozen=True)
class Unwritten(_Like):
    """Computes nothing for the last rows."""


@dataclass(frozen=True)
class Wild(_Like):
    """The kernel reads and writes outside of all memory."""


@dataclass(frozen=True)
class Hungry(_Like):
    """Takes so many bytes."""

    size: int


@dataclass(frozen=True)
class Loud(_Like):
    """Prints a lot; right."""


def _crash(config: Crashing, arranged: Arranged) -> Arranged:
    if config.words:
        print(config.words, flush=True)
    ctypes.string_at(0)
    return arranged


def _hang(config: Hanging, arranged: Arranged) -> Arranged:
    while True:
        pass


def _wrong(config: Wrong, arranged: Arranged) -> Arranged:
    return arranged._replace(stored=Stored(lambda A: {"a": A + 1}))


def _unwritten(config: Unwritten, arranged: Arranged) -> Arranged:
    return _ending(arranged, arranged.arguments["m"] - 1)


def _stray(config: Wild, arranged: Arranged) -> Arranged:
    return _ending(arranged, 2**30)


class _Ending(Arranged):
    """One block of rows that ends in the wrong place: at `overrides["end"]`."""

    def computed(self, func: Any, sizes: Any) -> dict[str, Any]:
        ends = np.array([0, self.overrides["end"]], self.arguments["indptr"].dtype)
        computed = Arranged(self.stored, self.arguments).computed(func, sizes)
        return {**computed, "blocks": 1, "I_ptr": ends}


def _ending(arranged: Arranged, row: int) -> Arranged:
    return _Ending(arranged.stored, arranged.arguments, {"end": row})


def _fill(config: Hungry, arranged: Arranged) -> Arranged:
    np.empty(config.size, "uint8")
    return arranged


def _print(config: Loud, arranged: Arranged) -> Arranged:
    os.write(1, b"to stdout\n" * 10_000)
    os.write(2, b"to stderr\n" * 10_000)
    return arranged


def _arranging(act: Callable[[Any, Arranged], Arranged]) -> Callable[..., Arranged]:
    def arrange(pattern: CsrPattern, problem: Spmm, config: Any) -> Arranged:
        return act(config, row_tile.arrange(pattern, problem, RIGHT))

    return arrange


def _apply(sch: Any, config: Any) -> None:
    row_tile.apply(sch, RIGHT)


for _kind, _act in {
    Crashing: _crash, Hanging: _hang, Wrong: _wrong, Unwritten: _unwritten, Wild: _stray,
    Hungry: _fill, Loud: _print,
}.items():  # fmt: skip
    register(Template(_kind, Spmm, program, _apply, _arranging(_act)))
