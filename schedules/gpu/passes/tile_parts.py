"""What programs of tiles are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from tvm import ir, tirx

from sparsetir.schedules.passes.nests import is_choice, is_zero
from sparsetir.sparse_ir.expressions import as_dtype, free_vars

__all__ = ["VECTOR", "Factor", "Loop", "Nest", "Parts", "RegisterTile", "Side", "stride_of"]

VECTOR = 8  # 16-bit numbers in 16 bytes


@dataclass(eq=False)
class Parts:
    """Parts that the statements of a loop are done in, one after the other.

    var : number of the part; count : how many; size : coordinates of one
    """

    var: Any
    count: int
    size: int


@dataclass(eq=False)
class Nest:
    """Loops of constant extents around stores.

    loops : (variable, extent), outermost first
    reduced : variables of these that are reduced over
    init : what the result begins with
    stores : (condition or None, store)
    cut : the variable of which it visits a part at a time, and the parts, or None
    """

    name: str
    loops: list[tuple[Any, int]]
    reduced: list[Any]
    init: Any
    stores: list[tuple[Any, Any]]
    cut: tuple[Any, Parts] | None = None

    @property
    def extents(self) -> dict[Any, int]:
        """Of its loops, in one part."""
        found = dict(self.loops)
        if self.cut is not None:
            found[self.cut[0]] = self.cut[1].size
        return found

    def first(self, var: Any) -> Any:
        """Where a loop begins, in this part."""
        if self.cut is None or not self.cut[0].same_as(var):
            return 0
        return self.cut[1].var * self.cut[1].size


@dataclass(eq=False)
class Loop:
    """A loop of any extent around statements.

    name : of the block in it; parts : in which all of them are done, or None
    """

    name: str
    var: Any
    extent: Any
    body: list[Any]
    parts: Parts | None = None


@dataclass(eq=False)
class RegisterTile:
    """A buffer that is kept in registers.

    owner : which of its dimensions is shared out; columns : extent of the other, 0 without one
    """

    buffer: Any
    owner: int
    columns: int
    registers: Any


@dataclass(eq=False)
class Factor:
    """A tile of numbers in shared memory.

    value : in terms of `row` and `column`
    step : the loop that it is copied in; None for one that stays
    shared : the buffer; copy : name of the block that fills it
    """

    row: Any
    column: Any
    rows: int
    columns: int
    value: Any
    step: Any
    shared: Any
    copy: str

    def at(self, row: Any, column: Any) -> list[Any]:
        """The index of an element. One: TVM takes places out that it sees unused."""
        return [as_dtype(row, "int32") * self.stride + as_dtype(column, "int32")]

    @property
    def stride(self) -> int:
        """Of its rows."""
        return stride_of(self.columns)

    def plain(self) -> bool:
        """Whether rows are copied as they are, 16 bytes at a time."""
        condition, source = _guarded(self.value)
        if source is None or self.columns % VECTOR:
            return False
        *outer, last = source.indices
        others = [*outer] if condition is None else [*outer, condition]
        if any(self.column in free_vars(x) for x in others) or not last.same_as(self.column):
            return False
        length = source.source.ty.shape[-1]
        return isinstance(length, tirx.IntImm) and int(length) % VECTOR == 0


class Side(NamedTuple):
    """A factor of one product; along : whether its rows lie along the sum."""

    factor: Factor
    along: bool


def stride_of(columns: int) -> int:
    """Of rows in shared memory: an odd number of 16 bytes, so that 8 begin in different banks."""
    return columns if columns // VECTOR % 2 else columns + VECTOR


def _guarded(value: Any) -> tuple[Any, Any]:
    """(condition or None, load) of a load that is zero without the condition; (None, None)."""
    condition = None
    if is_choice(value) and is_zero(value.args[2]):
        condition, value, _ = value.args
    return (condition, value) if isinstance(value, ir.TensorLoad) else (None, None)
