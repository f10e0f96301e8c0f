"""What primitives that cut a loop declare: axes, and parameters that are computed."""

from __future__ import annotations

from typing import Any, NoReturn

from tvm import ir, tirx

from sparsetir.sparse_ir.computed import keyword
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.names import fresh_name
from sparsetir.sparse_ir.nodes import (
    Axis,
    FusedAxis,
    SparseFunc,
    SparseIteration,
    flat_axes,
)
from sparsetir.sparse_ir.schedule.handles import SpIter
from sparsetir.sparse_ir.schedule.loops import (
    Loop,
    changed,
    handle_of,
    loops_of,
    replaced,
    show,
)
from sparsetir.sparse_ir.workers import divided

__all__ = ["MOST", "Cut", "is_path"]

# Of parts, as arrays of where more begin would take gigabytes, and of visits in a tile.
MOST = 2**24


class Cut:
    """A loop that is being cut, and what that adds to the function.

    who : the primitive, for messages
    loop : one of the loops of `it`, which is an iteration of `func`
    """

    def __init__(self, who: str, func: SparseFunc, it: SparseIteration, loop: Loop) -> None:
        self.who, self.func, self.it, self.loop = who, func, it, loop
        self.computed: dict[str, Any] = dict(func.attrs.get("computed", {}).items())
        self.params: list[Any] = []
        self.axes: list[Axis] = []
        self.visited = flat_axes([loop.node])
        self.last, self.idtype = self.visited[-1], self.visited[-1].idtype

    def axis(self, what: str, **fields: Any) -> Axis:
        """A new axis, named after the loop."""
        name = self._name(f"{self.loop.name}_{what}", [a.name for a in self.axes])
        self.axes.append(Axis(name=name, idtype=self.idtype, **fields))
        return self.axes[-1]

    def array(self, what: str, how: dict[str, Any]) -> Any:
        """A new parameter, an array that the recipe `how` makes."""
        name = self._name(f"{self.loop.name}_{what}", list(self.computed))
        handle = ir.Var(name, ir.PointerType(ir.PrimType("void")))
        self.params.append(handle)
        self.computed[name] = how
        return handle

    def number(self, what: str, how: dict[str, Any], exactly: bool = False) -> Any:
        """A new parameter, an integer that the recipe `how` makes.

        exactly : `what` is its name; otherwise it is named after the loop
        """
        wish = what if exactly else f"{self.loop.name}_{what}"
        name = self._name(wish, list(self.computed))
        if exactly and name != what:
            self.refuse(
                f"argument 'parts': expected a number or a new name, got {what!r}, which the "
                "function has already"
            )
        var = tirx.Var(name, self.idtype)
        self.params.append(var)
        self.computed[name] = how
        return var

    def named(self, size: Any) -> Any:
        """A size or an array as a recipe takes it."""
        found = keyword(size)
        if found is None:
            self.refuse(f"expected a size that is a number or a parameter, got {size}")
        return found

    def check_count(self, name: str, value: Any, *, least: int = 1, or_name: bool = False) -> None:
        """Refuse an argument that is no such integer, or, where that is legal, no name."""
        if or_name and isinstance(value, str) and value.isidentifier():
            return
        if type(value) is int and least <= value < MOST:
            return
        expected = "a positive integer" if least else "an integer of 0 or more"
        expected += " or a name" if or_name else ""
        expected += f" below {MOST}" if type(value) is int and value >= MOST else ""
        self.refuse(f"argument '{name}': expected {expected}, got {value!r}")

    def done(self, made: list[Loop], **fields: Any) -> tuple[SparseFunc, list[SpIter]]:
        """The function with the loops made instead of the one that is cut, and their handles."""
        for names in divided(self.it):
            if self.loop.name in names:
                self.refuse(
                    f"{names} is divided among workers and has to stay as it is; expected "
                    f"{self.who} before parallelize"
                )
        loops = loops_of(self.it)
        place = [loop.axes for loop in loops].index(self.loop.axes)
        new = changed(self.it, [*loops[:place], *made, *loops[place + 1 :]], **fields)
        out = replaced(
            self.who, self.func.with_attr("computed", self.computed), self.it, new,
            axes=self.axes, params=self.params,
        )  # fmt: skip
        return out, [handle_of(self.it, loop) for loop in made]

    def refuse(self, message: str) -> NoReturn:
        """Raise ScheduleError with the iteration."""
        raise ScheduleError(f"{self.who}: {message}\n{show(self.it)}")

    def _name(self, wish: str, taken: list[str]) -> str:
        return fresh_name(self.func, wish, taken)


def is_path(node: Any) -> bool:
    """Whether a loop is over a root axis, or over axes fused from a root on."""
    if not isinstance(node, Axis | FusedAxis):
        return False
    axes = flat_axes([node])
    return [a.name for a in axes] == [a.name for a in axes[-1].ancestors()]
