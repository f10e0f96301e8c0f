"""Every illegal use of a stage-I primitive shows the iteration and says what is legal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import sparsetir
from programs import PROGRAMS
from schedule_common import opened, program

ScheduleError = sparsetir.ScheduleError


HEAD = r'  in T.sp_iter([I, J, K], "SRS", "spmm")'


def refused(act: Callable[..., Any], message: str, head: str = HEAD, func: Any = None,
            name: str = "spmm") -> None:  # fmt: skip
    """The message and the iteration are shown, and nothing has changed."""
    sch, it, loops = opened(func, name)
    try:
        act(sch, it, *loops)
    except ScheduleError as error:
        text, _, shown = str(error).partition("\n")
        assert text == message
        assert shown == head
        return
    raise AssertionError("nothing was refused")


def test_split_refuses_words_and_numbers() -> None:
    expected = "two or more positive integers, the first of which may be None"
    for factors in ([4], [None, None], [None, 0], [None, True], [2, -1], ["4", 4], 16):
        refused(
            lambda s, it, i, j, k, f=factors: s.split(k, f),
            f"split: argument 'factors': expected {expected}, got {factors!r}",
        )
    refused(
        lambda s, it, i, j, k: s.split(k, [None, 4], tail="cut"),
        "split: argument 'tail': expected one of guard, shift, repeat, exact, got 'cut'",
    )
    refused(
        lambda s, it, i, j, k: s.split(k, [2, 4], tail="exact"),
        "split: argument 'factors': expected their product to be the length of axis 'K', feat, "
        "got 8; None as the first is as many as it takes",
    )

    def of_four(sch: Any, k: Any) -> None:
        sch.bound(k, 4, "exact")
        sch.split(k, [4, 2], tail="exact")

    refused(
        lambda s, it, i, j, k: of_four(s, k),
        "split: argument 'factors': expected their product to be the length of axis 'K', 4, got 8; "
        "None as the first is as many as it takes",
    )


def test_split_refuses_tails_that_would_repeat_or_miss() -> None:
    def bounded(sch: Any, k: Any, length: int, tail: str) -> None:
        sch.bound(k, length, "exact")
        sch.split(k, [None, 16], tail=tail)

    refused(
        lambda s, it, i, j, k: bounded(s, k, 100, "exact"),
        "split: argument 'tail': \"exact\" expects axis 'K' to be a multiple of 16 long, got 100; "
        '"guard", "shift" and "repeat" are legal',
    )
    refused(
        lambda s, it, i, j, k: bounded(s, k, 15, "shift"),
        "split: argument 'tail': \"shift\" expects axis 'K' to hold a tile of 16, got 15 "
        'coordinates; "guard" and "repeat" are legal',
    )


def test_split_refuses_to_part_an_axis_from_its_parent() -> None:
    refused(
        lambda s, it, i, j, k: s.split(i, [None, 4]),
        "split: axis 'J' would be parted from its parent 'I'; divide keeps it under it",
    )


def test_a_shifted_tile_needs_its_length_when_called() -> None:
    sch, _, (_, _, k) = opened()
    sch.split(k, [None, 4], tail="shift")
    arguments = PROGRAMS["spmm"].inputs(np.random.default_rng(0), "empty", "float32", "int32")
    kernel = sparsetir.build(sch)
    with pytest.raises(ValueError, match=r"'feat': expected at least 4, .* got 3"):
        kernel(**arguments)


def test_divide_refuses() -> None:
    refused(
        lambda s, it, i, j, k: s.divide(i, 4, by="rows"),
        "divide: argument 'by': expected one of positions, work, coordinates, got 'rows'",
    )
    for parts in (0, True, 1.5, "4 x"):
        refused(
            lambda s, it, i, j, k, p=parts: s.divide(i, p),
            f"divide: argument 'parts': expected a positive integer or a name, got {parts!r}",
        )
    refused(
        lambda s, it, i, j, k: s.divide(i, "feat"),
        "divide: argument 'parts': expected a number or a new name, got 'feat', which the "
        "function has already",
    )
    refused(
        lambda s, it, i, j, k: s.divide(k, 4, by="work"),
        "divide: by=\"work\" expects a variable axis under 'K' in the iteration; "
        'by="positions" makes parts of equal length',
    )
    refused(
        lambda s, it, i, j, k: s.divide(i, 4, by="coordinates"),
        'divide: by="coordinates" expects a sparse_variable axis whose coordinates differ, got '
        "'I'",
    )
    refused(
        lambda s, it, i, j, k: s.divide(s.divide(i, 4)[1], 4),
        "divide: 'I' is in parts already; divide a part's children, or split",
        '  in T.sp_iter([I_parts, T.part(I, I_part), J, K], "SSRS", "spmm")',
    )


def test_bound_refuses() -> None:
    refused(
        lambda s, it, i, j, k: s.bound(k, 64, "about"),
        "bound: argument 'kind': expected one of exact, max, min, multiple, got 'about'",
    )
    refused(
        lambda s, it, i, j, k: s.bound(k, 0, "exact"),
        "bound: argument 'n': expected a positive integer, got 0",
    )
    refused(
        lambda s, it, i, j, k: s.bound(s.sparse_fuse(it, [i, j]), 4, "max"),
        "bound: expected a loop over one axis, got 'I_J', whose extent is no length",
        '  in T.sp_iter([T.fuse(I, J), K], "SRS", "spmm")',
    )

    def twice(sch: Any, k: Any) -> None:
        sch.bound(k, 64, "exact")
        sch.bound(k, 48, "multiple")

    refused(
        lambda s, it, i, j, k: twice(s, k),
        "bound: axis 'K' has 64 coordinates, which is not a multiple of 48",
    )
    refused(
        lambda s, it, i, j, k: s.bound(s.split(k, [None, 4])[0], 4, "max"),
        "bound: expected the length of the axis to be a parameter of 'spmm' or a number, for a "
        "promise that kernels can check, got (feat + 3) // 4",
        '  in T.sp_iter([I, J, K0, K1], "SRSS", "spmm")',
    )


def test_precompute_refuses_words() -> None:
    refused(
        lambda s, it, i, j, k: s.precompute("D", i, [k]),
        "precompute: argument 'buffer': expected one of ['A', 'B', 'C'], got 'D'",
    )
    refused(
        lambda s, it, i, j, k: s.precompute("C", i, [k], scope="registers"),
        "precompute: argument 'scope': expected one of local, global, shared, got 'registers'",
    )
    refused(
        lambda s, it, i, j, k: s.precompute("C", j, [i]),
        "precompute: expected loops inside of the place of the workspace, ['K'], got 'I'; "
        "sparse_reorder can bring it there",
    )
    refused(
        lambda s, it, i, j, k: s.precompute("C", i, [k]),
        'precompute: expected loops of constant extent for a workspace in scope "local", got '
        "'K' of feat; split it first",
    )
    refused(
        lambda s, it, i, j, k: s.precompute("C", it, [i, k], lanes=[k], scope="global"),
        "precompute: argument 'lanes': expected reduction loops, got 'K'",
    )
    refused(
        lambda s, it, i, j, k: s.precompute("C", i, [j], scope="global"),
        "precompute: expected loops over dense axes for the workspace, got 'J'",
    )


def test_precompute_refuses_what_changes_meanwhile() -> None:
    refused(
        lambda s, it, i, j, k: s.precompute("C", i, [], scope="global"),
        "precompute: the spatial loop 'K' inside would change what the workspace stands for; "
        "expected it among the axes [], or outside",
    )
    head = '"spmm") as [i, j, k]:\n'
    ordered = program().script().replace(head, head + " " * 8 + 'T.sp_iter_attr({"ordered": 1})\n')
    text = ordered.replace("C[i, k] + A[i, j]", "C[i, k] + C[i, 0] * A[i, j]")
    refused(
        lambda s, it, i, j, k: s.precompute("C", i, [k], scope="global"),
        "precompute: 'C' is accessed at more than one place, [i, k] and [i, 0]: the value that the "
        "workspace holds would change in between",
        func=sparsetir.from_source(text),
    )
    text = ordered.replace("C[i, k] + A[i, j]", "C[i, k] * 2.0 + A[i, j]")
    refused(
        lambda s, it, i, j, k: s.precompute("C", j, [k], scope="global"),
        "precompute: where a visit does not see all terms of an element expects a body of the form "
        "X[..] = X[..] + term (or *, max, min), got another",
        func=sparsetir.from_source(text),
    )


def test_precompute_refuses_copies() -> None:
    refused(
        lambda s, it, i, j, k: s.precompute("B", i, ["J_", k]),
        "precompute: a copy of 'B' would part the iteration from its init; expected its result to "
        "be precomputed first",
    )
    refused(
        lambda s, it, i, j, k: s.precompute("B", i, ["J_"], hoist=True),
        "precompute: argument 'hoist': expected none, as 'B' is only read here",
    )

    def first(sch: Any, i: Any, k: Any, axes: list[Any]) -> None:
        sch.precompute("C", i, [k], scope="global")
        sch.precompute("B", i, axes)

    head = '  in T.sp_iter([I], "S", "spmm")'
    refused(
        lambda s, it, i, j, k: first(s, i, k, ["J_"]),
        "precompute: the index k of axis 'K' depends on ['k'], which the copy does not go over; "
        "expected 'K' or these loops among the axes",
        head,
    )
    refused(
        lambda s, it, i, j, k: first(s, i, k, ["J"]),
        "precompute: argument 'axes': expected handles of loops inside of the place of the copy, "
        "among ['K'], or names of axes of 'B', among ['J_', 'K'], got the name 'J'",
        head,
    )
    refused(
        lambda s, it, i, j, k: s.precompute("B", i, ["J__", k]),  # before what an init needs
        "precompute: argument 'axes': expected handles of loops inside of the place of the copy, "
        "among ['K'], or names of axes of 'B', among ['J_', 'K'], got the name 'J__'",
    )
    refused(
        lambda s, it, i, j, k: first(s, i, k, [j, k]),
        "precompute: argument 'axes': expected dense axes to copy over, got 'J' (sparse_variable)",
        head,
    )


def test_loops_that_went_elsewhere() -> None:
    def copied(sch: Any, it: Any, i: Any, j: Any, k: Any) -> None:
        sch.sparse_reorder(it, [k, i, j])
        sch.precompute("C", i, [])
        sch.precompute("B", k, ["J_"], scope="global")
        sch.parallelize(i)

    refused(
        copied,
        "parallelize: 'I' is not an axis of this iteration, but of ['spmm_rest'], whose "
        "get_sp_iters gives its handle",
        '  in T.sp_iter([K], "S", "spmm")',
    )


def test_parallelize_refuses_races_that_are_not_proven() -> None:
    legal = (
        'legal are loops whose coordinates each write elements of their own, or race="ignore" '
        "where you know that visits do not meet"
    )
    refused(
        lambda s, it, i, j, k: s.parallelize(j),
        f"parallelize: loop 'J' is not proven free of races (reduction: C); {legal}",
    )
    refused(
        lambda s, it, e, k: s.parallelize(e),
        f"parallelize: loop 'E' is not proven free of races (scatter: C); {legal}",
        '  in T.sp_iter([E, K], "SS", "scatter")',
        program("spmm_coo_scatter"),
        "scatter",
    )


def test_parallelize_refuses_words() -> None:
    refused(
        lambda s, it, i, j, k: s.parallelize(j, race="atomics"),
        'parallelize: argument \'race\': expected "none" or "ignore" or "temporary" for '
        "unit \"cpu\", got 'atomics': a CPU has "
        "no atomic update of what several workers add to; legal are loops over rows that one "
        'worker owns, or race "temporary", where workers have copies that are summed, for loops '
        "that are cut by their positions",
    )
    refused(
        lambda s, it, i, j, k: s.parallelize(i, race="maybe"),
        'parallelize: argument \'race\': expected "none" or "ignore" or "temporary" for unit '
        "\"cpu\", got 'maybe'",
    )
    refused(
        lambda s, it, i, j, k: s.parallelize(i, "gpu"),
        'parallelize: argument \'unit\': expected "cpu" or "block" or "warp" or "thread" or '
        "\"vector\", got 'gpu'",
    )
    sch = sparsetir.Schedule(program())
    with pytest.raises(ScheduleError, match="argument 'loop': expected one or more loops, got"):
        sch.parallelize([])


def test_parallelize_refuses_loops_that_are_not_one() -> None:
    refused(
        lambda s, it, i, j, k: s.parallelize([i, k]),
        "parallelize: argument 'loop': expected neighbours in the order of the iteration, got "
        "['I', 'K']; sparse_reorder can bring them together",
    )
    refused(
        lambda s, it, i, j: s.parallelize([i, j]),
        "parallelize: argument 'loop': the extent of 'J' depends on ['I'], so that they are not "
        "one loop; legal is one of them, or sparse_fuse before",
        '  in T.sp_iter([I, J], "SS", "elementwise")',
        program("elementwise"),
        "elementwise",
    )


def test_threads_do_not_nest() -> None:
    def both(sch: Any, first: Any, second: Any) -> None:
        sch.parallelize(first)
        sch.parallelize(second)

    legal = (
        "is divided among threads already, which do not nest; legal are neighbouring loops as "
        "one, such as parallelize([outer, inner])"
    )
    refused(lambda s, it, i, j, k: both(s, i, k), f"parallelize: ['I'] {legal}")
    softmax = program("row_softmax")

    def inside(sch: Any, row: Any) -> None:
        (j,) = sch.get_sp_iters(sch.get_sparse_iteration("divide"))
        both(sch, j, row)

    refused(
        lambda s, it, i: inside(s, i),
        f"parallelize: ['J'] of 'divide' {legal}",
        '  in T.sp_iter([I], "S", "softmax")',
        softmax,
        "softmax",
    )
    sch = sparsetir.Schedule(softmax)
    (j,) = sch.get_sp_iters(sch.get_sparse_iteration("divide"))
    sch.parallelize(j)
    assert "T.parallel(m)" not in sparsetir.lower(sch)["III"].script(), "the default lets it be"


def test_what_is_divided_stays_as_it_is() -> None:
    def cut(sch: Any, it: Any, i: Any, j: Any, k: Any) -> None:
        sch.parallelize(k)
        sch.split(k, [None, 4])

    def fuse(sch: Any, it: Any, i: Any, j: Any, k: Any) -> None:
        sch.parallelize(i)
        sch.sparse_fuse(it, [i, j])

    def move(sch: Any, it: Any, i: Any, j: Any, k: Any) -> None:
        sch.sparse_reorder(it, [i, k, j])
        sch.parallelize([i, k])
        sch.sparse_reorder(it, [i, j, k])

    stays = "is divided among workers and has to stay as it is; expected"
    refused(cut, f"split: ['K'] {stays} split before parallelize")
    refused(
        lambda s, it, i, j, k: s.parallelize(i) or s.divide(i, 4),
        f"divide: ['I'] {stays} divide before parallelize",
    )
    refused(fuse, f"sparse_fuse: ['I'] {stays} sparse_fuse before parallelize")
    refused(
        move,
        f"sparse_reorder: ['I', 'K'] {stays} sparse_reorder before parallelize",
        '  in T.sp_iter([I, K, J], "SSR", "spmm")',
    )

    def inside(sch: Any, it: Any, i: Any, j: Any, k: Any) -> None:
        sch.parallelize(k)
        sch.precompute("C", i, [k], scope="global")

    refused(
        inside,
        "precompute: ['K'] inside is divided among workers; expected precompute before parallelize",
    )


def test_annotations_by_hand_name_loops() -> None:
    sch, it, (i, *_) = opened()
    sch.parallelize(i)
    text = sch.func.script().replace('"loops": ["I"]', '"loops": ["Q"]')
    with pytest.raises(
        sparsetir.LoweringError,
        match=r"sp_iter 'spmm': annotation 'parallel': expected names of its loops, "
        r"\['I', 'J', 'K'\], got \['Q'\]",
    ):
        sparsetir.lower_sparse_iter(sparsetir.from_source(text))
