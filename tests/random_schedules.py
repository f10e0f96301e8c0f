"""Random sequences of stage-I primitives on a function: legal ones are applied, others say why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sparsetir
from sparsetir.sparse_ir.computed import compute
from sparsetir.sparse_ir.nodes import sparse_iterations, stores_of
from sparsetir.sparse_ir.promises import check_promises, promises_of
from sparsetir.sparse_ir.schedule.divide import divide
from sparsetir.sparse_ir.schedule.facts import KINDS, bound
from sparsetir.sparse_ir.schedule.group_columns_by_pattern import group_columns_by_pattern
from sparsetir.sparse_ir.schedule.loops import loops_of
from sparsetir.sparse_ir.schedule.parallelize import parallelize
from sparsetir.sparse_ir.schedule.peel import peel
from sparsetir.sparse_ir.schedule.precompute import SCOPES, precompute
from sparsetir.sparse_ir.schedule.ranges import ranges
from sparsetir.sparse_ir.schedule.sell_slices import sell_slices
from sparsetir.sparse_ir.schedule.sort_rows_by_length import sort_rows_by_length
from sparsetir.sparse_ir.schedule.split import TAILS, split
from sparsetir.sparse_ir.schedule.strip_mine_rows import strip_mine_rows

__all__ = ["schedule_at_random"]

Choose = Callable[[Sequence[Any]], Any]
FACTORS = ([None, 2], [None, 3], [None, 4], [None, 2, 2], [4, 2], [None, 16])
WIDER = {"float16": "float32", "float32": "float64", "bfloat16": "float32"}


def schedule_at_random(
    func: Any,
    arguments: Mapping[str, Any],
    choose: Choose,
    moves: int,
    finite: bool,
    scopes: Sequence[str] = SCOPES,
    threads: bool = False,
) -> Any:
    """A schedule of the function after some legal moves.

    arguments : what the function is to be called with; promises that do not hold are not made
    choose : one of a sequence
    moves : how many are tried
    finite : whether all values are, so that factors may be taken out of sums
    scopes : of workspaces
    threads : whether loops are divided among those of a GPU, too
    """
    sch = sparsetir.Schedule(func)
    for _ in range(moves):
        before = sch.func
        move = choose(MOVES + 2 * ON_THREADS if threads else MOVES)
        try:
            move(_Drawing(sch, arguments, choose, finite, scopes))
        except sparsetir.ScheduleError as error:
            assert "in T.sp_iter([" in str(error), f"does not show the iteration: {error}"
            assert sch.func is before
        except _Skipped:
            assert sch.func is before
    return sch


class _Skipped(Exception):
    """A move that cannot be applied here."""


class _Drawing:
    """The state of a move: the schedule, one of its iterations, and choices."""

    def __init__(
        self,
        sch: Any,
        arguments: Mapping[str, Any],
        choose: Choose,
        finite: bool,
        scopes: Sequence[str],
    ) -> None:
        self.sch, self.arguments, self.choose = sch, arguments, choose
        self.finite, self.scopes = finite, scopes
        names = [it.name for it in sparse_iterations(sch.func)]
        name = choose(names)
        self.it = next(it for it in sparse_iterations(sch.func) if it.name == name)
        self.ref = sch.get_sparse_iteration(name)
        self.loops = sch.get_sp_iters(self.ref)

    def loop(self) -> Any:
        if not self.loops:
            raise _Skipped
        return self.choose(self.loops)

    def neighbours(self) -> list[Any]:
        if len(self.loops) < 2:
            raise _Skipped
        first = self.choose(range(len(self.loops) - 1))
        return self.loops[first : first + 2]

    def some(self, items: Sequence[Any]) -> list[Any]:
        return [item for item in items if self.choose((True, False))]

    def apply(self, primitive: Any, *inputs: Any, **options: Any) -> Any:
        """Apply a primitive unless the arguments break what it promises."""
        func, _ = primitive(self.sch.func, *inputs, **options)
        try:
            values = {**self.arguments, **compute(func, self.arguments)}
            check_promises(func.name, promises_of(func), values)
        except ValueError:
            raise _Skipped from None
        return getattr(self.sch, primitive.__name__)(*inputs, **options)


def _reorder(d: _Drawing) -> None:
    order, left = [], list(d.loops)
    while left:
        order.append(left.pop(d.choose(range(len(left)))))
    d.sch.sparse_reorder(d.ref, order)


def _divide(d: _Drawing) -> None:
    by = d.choose(("positions", "work", "coordinates"))  # first: seeds of tests are known by it
    d.apply(divide, d.loop(), d.choose((1, 2, 3, "blocks")), by=by)


def _bound(d: _Drawing) -> None:
    kind = d.choose(KINDS)
    sizes = sorted({v for v in d.arguments.values() if isinstance(v, int) and v > 0})
    d.apply(bound, d.loop(), d.choose(sizes), kind)


def _result(d: _Drawing) -> None:
    written = [b.name for b in d.sch.func.buffers if _writes(d.it, b)]
    if not written:
        raise _Skipped
    place = d.choose(range(len(d.loops) + 1))
    inside = d.loops[place:]
    kinds = _kinds(d.it)
    spatial = [x for x in inside if "S" in kinds[x.axes]]
    reduced = [x for x in inside if kinds[x.axes] == "R"]
    options: dict[str, Any] = {"scope": d.choose(d.scopes)}
    if d.choose((False, False, True)):
        options["lanes"] = d.some(reduced)
    if d.finite and d.choose((False, False, True)):
        options["hoist"] = True
    buffer = d.choose(written)
    wide = WIDER.get(d.sch.func.buffer(buffer).dtype)
    if wide and d.choose((False, False, True)):
        options["dtype"] = wide
    where = d.loops[place - 1] if place else d.ref
    d.apply(precompute, buffer, where, spatial, **options)


def _operand(d: _Drawing) -> None:
    buffers = [b for b in d.sch.func.buffers if b.axes is not None and not _writes(d.it, b)]
    if not buffers:
        raise _Skipped
    operand = d.choose(buffers)
    place = d.choose(range(len(d.loops) + 1))
    axes = d.some(d.loops[place:]) + d.some([a.name for a in operand.axes])
    where = d.loops[place - 1] if place else d.ref
    d.apply(precompute, operand.name, where, axes, scope="global")


def _threads(d: _Drawing) -> None:
    loops = d.loop() if d.choose((True, True, False)) else d.neighbours()
    unit = d.choose(("block", "thread", "thread", "warp", "vector"))
    races = ("none", "atomics", "temporary", "group(4)", "segment(4)", "segment(32)")
    race = d.choose(("none", *races))
    options: dict[str, Any] = {"race": race}
    if unit in ("thread", "warp") and race in ("none", "atomics"):
        options["per_block"] = d.choose((None, 4, 32))
    d.apply(parallelize, loops, unit, **options)


def _distribute(d: _Drawing) -> None:
    if not d.loops:
        raise _Skipped
    d.sch.distribute(d.loops[-d.choose((1, 2)) :])


def _slices(d: _Drawing) -> None:
    if len(d.loops) < 2:
        raise _Skipped
    options = {"longest": d.choose((4, 5, 9, "longest")), "window": d.choose((1, 3, 4096))}
    lanes = d.choose((1, 2, 4))
    d.apply(sell_slices, d.loop(), d.loop(), lanes, **options, filled=d.choose((1, 90, 101)))


def _positions(d: _Drawing) -> None:
    fused = [x for x in d.loops if len(x.axes) > 1]
    slots = [a.name for a in d.sch.func.axes if a.kind == "sparse_fixed"]
    fused += [x for x in d.loops if x.name in slots]
    if not fused:
        raise _Skipped
    d.sch.positions(
        d.choose(fused), parts=d.choose((None, None, 2)), rows=d.choose(("table", "search"))
    )


def _pack(d: _Drawing) -> None:
    d.sch.pack(d.choose([b.name for b in d.sch.func.buffers]), d.ref)


def _tiles(d: _Drawing) -> None:
    buffer = d.choose(d.sch.func.buffers)
    names = [a.name for a in buffer.axes or []]
    if not names:
        raise _Skipped
    cut = d.choose(names)
    order = [f"{cut}0", *(name for name in names if name != cut), f"{cut}1"]
    d.sch.tiles(buffer.name, d.ref, {cut: [d.choose((1, 2, 5))]}, order=order)


def _drawn(primitive: Any, *choices: Any, **options: Any) -> Callable[[_Drawing], None]:
    """A move: a loop, or a function of the drawing, and for the others one of each sequence."""

    def move(d: _Drawing) -> None:
        arguments = [x(d) if callable(x) else d.choose(x) for x in choices]
        named = {k: d.choose(x) for k, x in options.items()}
        d.apply(primitive, *arguments, **named)

    return move


def _loops(d: _Drawing) -> Any:
    return d.loop() if d.choose((True, False)) else d.neighbours()


LOOP = _Drawing.loop
_split = _drawn(split, LOOP, FACTORS, tail=TAILS)
_patterns = _drawn(group_columns_by_pattern, LOOP, LOOP, (2, 3), by=("pattern", "count"))
MOVES = (
    _reorder, lambda d: d.sch.sparse_fuse(d.ref, d.neighbours()), _split,
    _divide,
    _bound, _result, _operand, _drawn(parallelize, _loops, lambda d: "cpu"),
    lambda d: d.sch.annotate(d.ref, "note", "kept"), _reorder, _split, _split, _result, _result,
    _distribute, _slices, _slices, _drawn(sort_rows_by_length, LOOP, LOOP, (1, 3, 4096)), _pack,
    _pack, _drawn(strip_mine_rows, LOOP, (1, 2, 4)), _positions,
    lambda d: d.sch.segment_accumulate(d.loop()), _tiles, _tiles, _patterns, _patterns,
    _drawn(ranges, LOOP, (1, 2, "ranges"), (1, 3)), _drawn(peel, LOOP, (2, 3)),
)  # fmt: skip
ON_THREADS = (
    _threads, _threads, _threads, _threads, _drawn(strip_mine_rows, LOOP, (4, 32, 64)),
    lambda d: d.apply(split, d.loop(), [None, d.choose((4, 32, 64))], tail=d.choose(TAILS)),
)  # fmt: skip


def _writes(it: Any, buffer: Any) -> bool:
    return any(s.buffer.same_as(buffer.var) for s in stores_of(it.body, it.init))


def _kinds(it: Any) -> dict[tuple[str, ...], str]:
    return {loop.axes: loop.kinds for loop in loops_of(it)}
