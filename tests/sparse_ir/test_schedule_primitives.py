"""Each stage-I primitive: what its docstring shows, what it refuses, and its place in the trace."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm_ffi

import sparsetir
from programs import PROGRAMS, tolerance
from sparsetir.schedules.passes.exact_constants import exact_constants
from sparsetir.sparse_ir.schedule import SparseIterationRef, SpIter

GOLDEN = Path(__file__).parents[1] / "golden"
ScheduleError = sparsetir.ScheduleError


def program(name: str = "spmm", dtype: str = "float32") -> Any:
    return PROGRAMS[name].make(dtype, "int32")


def opened(func: Any = None, name: str = "spmm") -> tuple[Any, Any, list[Any]]:
    sch = sparsetir.Schedule(program() if func is None else func)
    it = sch.get_sparse_iteration(name)
    return sch, it, sch.get_sp_iters(it)


# -- docstrings -----------------------------------------------------------------------------------


def shown_split(sch: Any, it: Any, i: Any, j: Any, k: Any) -> None:
    sch.bound(k, 128, "exact")
    sch.split(k, [None, 4, 16])


def shown_divide(sch: Any, it: Any, i: Any, j: Any, k: Any) -> None:
    sch.divide(i, 16, by="work")


def shown_divide_coordinates(sch: Any, it: Any, i: Any, j: Any, k: Any) -> None:
    sch.divide(j, 4, by="coordinates")


def shown_bound(sch: Any, it: Any, i: Any, j: Any, k: Any) -> None:
    sch.bound(k, 64, "exact")


def tiled(sch: Any, it: Any, i: Any, j: Any, k: Any) -> tuple[Any, Any]:
    k0, k1 = sch.split(k, [None, 64], tail="exact")
    sch.sparse_reorder(it, [k0, i, j, k1])
    return k0, k1


def shown_precompute(sch: Any, it: Any, i: Any, j: Any, k: Any) -> None:
    _, k1 = tiled(sch, it, i, j, k)
    sch.precompute("C", i, [k1])


def shown_precompute_operand(sch: Any, it: Any, i: Any, j: Any, k: Any) -> None:
    k0, k1 = tiled(sch, it, i, j, k)
    sch.precompute("C", i, [k1])
    sch.precompute("B", k0, ["J_", k1], scope="global")


def shown_parallelize(sch: Any, it: Any, i: Any, j: Any, k: Any) -> None:
    k0, _ = tiled(sch, it, i, j, k)
    sch.parallelize([k0, i], "cpu")


# By golden text: what is done, and the module whose n-th "After" says the same.
SHOWN: dict[str, tuple[Callable[..., None], str, int]] = {
    "split": (shown_split, "split", 0),
    "divide_work": (shown_divide, "divide", 0),
    "divide_coordinates": (shown_divide_coordinates, "divide", 1),
    "bound": (shown_bound, "bound", 0),
    "precompute_result": (shown_precompute, "precompute", 0),
    "precompute_operand": (shown_precompute_operand, "precompute", 1),
    "parallelize": (shown_parallelize, "parallelize", 0),
}


@pytest.mark.parametrize("name", SHOWN)
def test_docstrings_show_what_happens(name: str) -> None:
    apply, module, number = SHOWN[name]
    sch, it, loops = opened()
    apply(sch, it, *loops)
    text = sch.func.script()
    assert text == (GOLDEN / f"schedule_{name}.txt").read_text()
    doc = importlib.import_module(f"sparsetir.sparse_ir.schedule.{module}").__doc__ or ""
    after = re.split(r"\bAfter ", doc)[1 + number].split("::\n\n")[1]
    block = re.split(r"\n(?=\S)", after)[0]
    lines = [line.strip() for line in block.splitlines() if line and "..." not in line]
    plain = text.replace(', idtype="int32"', "")
    plain = re.sub(r"T\.float32\(([^()]*)\)", r"\1", plain)
    have = {line.strip() for line in plain.splitlines()}
    assert lines and [line for line in lines if line not in have] == []


# -- refusals -------------------------------------------------------------------------------------

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
    for factors in ([4], [None, None], [None, 0], [None, True], [2, -1], ["4", 4]):
        refused(
            lambda s, it, i, j, k, f=factors: s.split(k, f),
            f"split: argument 'factors': expected {expected}, got {factors!r}",
        )
    refused(
        lambda s, it, i, j, k: s.split(k, [None, 4], tail="cut"),
        "split: argument 'tail': expected one of guard, shift, exact, got 'cut'",
    )
    refused(
        lambda s, it, i, j, k: s.split(k, [2, 4]),
        "split: argument 'factors': expected their product to reach the length of axis 'K', feat, "
        "got 8; None as the first is as many as it takes",
    )


def test_split_refuses_tails_that_would_repeat_or_miss() -> None:
    def bounded(sch: Any, k: Any, length: int, tail: str) -> None:
        sch.bound(k, length, "exact")
        sch.split(k, [None, 16], tail=tail)

    refused(
        lambda s, it, i, j, k: bounded(s, k, 100, "exact"),
        "split: argument 'tail': \"exact\" expects axis 'K' to be a multiple of 16 long, got 100; "
        '"guard" and "shift" are legal',
    )
    refused(
        lambda s, it, i, j, k: bounded(s, k, 15, "shift"),
        "split: argument 'tail': \"shift\" expects axis 'K' to hold a tile of 16, got 15 "
        'coordinates; "guard" is legal',
    )


def test_split_refuses_to_part_an_axis_from_its_parent() -> None:
    refused(
        lambda s, it, i, j, k: s.split(i, [None, 4]),
        "split: axis 'J' would be parted from its parent 'I'; divide keeps it under it",
    )
    refused(
        lambda s, it, i, j, k: s.split(j, [None, 4]),
        "split: expected a loop over one dense_fixed axis, got 'J' (sparse_variable); divide cuts "
        "other loops by their positions",
    )
    refused(
        lambda s, it, i, j, k: s.split(s.sparse_fuse(it, [i, j]), [None, 4]),
        "split: expected a loop over one dense_fixed axis, got 'I_J' (FusedAxis); divide cuts "
        "other loops by their positions",
        '  in T.sp_iter([T.fuse(I, J), K], "SRS", "spmm")',
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
    for parts in (0, True, 1.5):
        refused(
            lambda s, it, i, j, k, p=parts: s.divide(i, p),
            f"divide: argument 'parts': expected a positive integer or a name, got {parts!r}",
        )
    for parts in ("feat", "4 x"):
        refused(
            lambda s, it, i, j, k, p=parts: s.divide(i, p),
            f"divide: argument 'parts': expected a number or a new name, got {parts!r}",
        )
    refused(
        lambda s, it, i, j, k: s.divide(j, 4),
        "divide: expected a root axis, or axes fused from a root on, got 'J'; "
        'by="coordinates" cuts the columns of each row',
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
    text = program().script().replace("C[i, k] + A[i, j]", "C[i, k] + C[i, 0] * A[i, j]")
    refused(
        lambda s, it, i, j, k: s.precompute("C", i, [k], scope="global"),
        "precompute: 'C' is accessed at more than one place, [i, k] and [i, 0]: the value that the "
        "workspace holds would change in between",
        func=sparsetir.from_source(text),
    )
    text = program().script().replace("C[i, k] + A[i, j]", "C[i, k] * 2.0 + A[i, j]")
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
        "precompute: argument 'axes': expected loops inside of the place of the copy, or names of "
        "axes of 'B', from ['J', 'K', 'J_'], got 'J'",
        head,
    )
    refused(
        lambda s, it, i, j, k: first(s, i, k, [j, k]),
        "precompute: argument 'axes': expected dense axes to copy over, got 'J' (sparse_variable)",
        head,
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
        "parallelize: argument 'race': expected \"none\" or \"ignore\", got 'atomics': a CPU has no "
        "atomic update of what several workers add to; legal are loops over rows that one worker "
        'owns, or race "temporary", where workers have copies that are summed, for loops that are '
        "cut by their positions",
    )
    refused(
        lambda s, it, i, j, k: s.parallelize(j, race="temporary"),
        "parallelize: argument 'race': expected \"none\" or \"ignore\", got 'temporary': copies for "
        "each worker are made where loops are cut by their positions; legal are loops over rows "
        "that one worker owns",
    )
    refused(
        lambda s, it, i, j, k: s.parallelize(i, race="maybe"),
        "parallelize: argument 'race': expected \"none\" or \"ignore\", got 'maybe'",
    )
    for unit in ("block", "warp", "thread"):
        refused(
            lambda s, it, i, j, k, u=unit: s.parallelize(i, u),
            f"parallelize: argument 'unit': expected \"cpu\", got '{unit}': lower() and bind the "
            "loop to a thread axis there",
        )
    refused(
        lambda s, it, i, j, k: s.parallelize(k, "vector"),
        "parallelize: argument 'unit': expected \"cpu\", got 'vector': lower() and vectorize the "
        "loop there",
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
    sch, it, _ = opened()
    sch.annotate(it, "parallel", [{"loops": ["Q"], "unit": "cpu", "race": "ignore"}])
    with pytest.raises(
        sparsetir.LoweringError,
        match=r"sp_iter 'spmm': annotation 'parallel': expected names of its loops, "
        r"\['I', 'J', 'K'\], got \['Q'\]",
    ):
        sch.lower()


# -- what they make -------------------------------------------------------------------------------


def run(sch: Any, name: str = "spmm", case: str = "small", dtype: str = "float32") -> str:
    """The kernel's results are the oracle's; the text of what is compiled."""
    tested = PROGRAMS[name]
    arguments = tested.inputs(np.random.default_rng(0), case, dtype, "int32")
    expected = tested.oracle(arguments)
    kernel = sparsetir.build(sch)
    kernel(**arguments)
    for output, values in expected.items():
        np.testing.assert_allclose(
            arguments[output].astype(np.float64), values, **tolerance(dtype), equal_nan=True
        )
    return str(kernel.stages["III"].script())


@pytest.mark.parametrize("case", ["small", "empty", "nonfinite"])
def test_a_result_of_one_element(case: str) -> None:
    sch, _, (i, _) = opened(program("spmv"), "spmv")
    sch.precompute("Y", i, [])
    assert 'Y_ws = T.alloc_sparse_buffer((), "float32", scope="local")' in sch.func.script()
    run(sch, "spmv", case)


UPDATES = {
    "sum": ("0.0", "OUT[i, j] + X[i, k] * Y[j, k]"),
    "product": ("1.0", "OUT[i, j] * (X[i, k] + Y[j, k])"),
    "max": ('T.min_value("{dtype}")', "T.max(OUT[i, j], X[i, k] * Y[j, k])"),
    "min": ('T.max_value("{dtype}")', "T.min(OUT[i, j], X[i, k] * Y[j, k])"),
    "max that keeps NaN": (
        'T.min_value("{dtype}")',
        "T.Select(X[i, k] > OUT[i, j] or T.isnan(X[i, k]), X[i, k], OUT[i, j])",
    ),
}
UPDATED = """
@T.prim_func
def f(x: T.handle, y: T.handle, out: T.handle, indptr: T.handle, indices: T.handle,
      m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    J_ = T.dense_fixed(n)
    K = T.dense_fixed(feat)
    X = T.match_sparse_buffer(x, (I, K), "{dtype}")
    Y = T.match_sparse_buffer(y, (J_, K), "{dtype}")
    OUT = T.match_sparse_buffer(out, (I, J), "{dtype}")
    with T.sp_iter([I, J, K], "SSR", "it") as [i, j, k]:
        with T.init():
            OUT[i, j] = {init}
        OUT[i, j] = {update}
"""


def updated(kind: str, dtype: str) -> tuple[Any, dict[str, Any]]:
    """A reduction in another operator, and arguments for it."""
    init, update = UPDATES[kind]
    text = UPDATED.format(dtype=dtype, init=init.format(dtype=dtype), update=update)
    rng = np.random.default_rng(1)
    arguments = {
        "x": rng.uniform(-1, 1, (5, 7)).astype(dtype), "y": rng.uniform(-1, 1, (4, 7)).astype(dtype),
        "out": np.full(8, np.nan, dtype), "indptr": np.array([0, 2, 2, 5, 8, 8], "int32"),
        "indices": np.array([0, 3, 0, 1, 2, 1, 2, 3], "int32"), "m": 5, "n": 4, "nnz": 8, "feat": 7,
    }  # fmt: skip
    if "NaN" in kind:
        arguments["x"][2, 3] = np.nan
    return sparsetir.from_source(text), arguments


@pytest.mark.parametrize("tail", ["guard", "shift"])
@pytest.mark.parametrize("kind", UPDATES)
def test_lanes_and_wider_types_in_every_operator(kind: str, tail: str) -> None:
    func, arguments = updated(kind, "float16")
    expected = {**arguments, "out": arguments["out"].copy()}
    sparsetir.interpret(func, expected)
    sch, it, (i, j, k) = opened(func, "it")
    _, lane = sch.split(k, [None, 4], tail=tail)
    handles = sch.precompute("OUT", j, [], lanes=[lane], dtype="float32")
    assert [h.name for h in handles] == ["it_start", "it_reduce", "it_sums", "it_write"]
    text = sch.func.script()
    assert tvm_ffi.structural_equal(sparsetir.from_source(text), sch.func, map_free_vars=True)
    interpreted = {**arguments, "out": arguments["out"].copy()}
    sparsetir.interpret(sch.func, interpreted)
    np.testing.assert_allclose(interpreted["out"], expected["out"], rtol=4e-3, atol=4e-3)
    sparsetir.build(sch)(**arguments)
    np.testing.assert_allclose(arguments["out"], expected["out"], rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("case", ["small", "empty", "dense_row"])
def test_factors_that_stand_still_are_multiplied_once(case: str) -> None:
    sch, it, (i, j, k, f) = opened(program("mttkrp"), "mttkrp")
    sch.precompute("Y", j, [f], scope="global", hoist=True)
    text = sch.func.script()
    assert "Y_ws[f] = Y_ws[f] + A[i, j, k] * C[k, f]" in text
    assert "Y[i, f] = Y[i, f] + Y_ws[f] * B[j, f]" in text
    run(sch, "mttkrp", case)


def test_a_number_of_parts_by_name() -> None:
    sch, _, (i, _, _) = opened()
    sch.divide(i, "blocks", by="work", default=3)
    kernel = sparsetir.build(sch)
    tested = PROGRAMS["spmm"]
    arguments = tested.inputs(np.random.default_rng(0), "small", "float32", "int32")
    expected = tested.oracle(arguments)["c"]
    for given, parts in ((None, 3), ({"blocks": 5}, 5)):
        made = kernel.compute(arguments, given=given)
        assert made["blocks"] == parts and len(made["I_ptr"]) == parts + 1
        arguments["c"][:] = np.nan
        kernel(**arguments, **made)
        np.testing.assert_allclose(arguments["c"], expected, **tolerance("float32"))


@pytest.mark.parametrize("case", ["small", "empty", "dense_row", "single_column"])
def test_ranges_of_columns(case: str) -> None:
    sch, it, (i, j, k) = opened()
    parts, j = sch.divide(j, 3, by="coordinates")
    sch.sparse_reorder(it, [i, parts, j, k])
    sch.precompute("C", parts, [k], scope="global")
    run(sch, "spmm", case)


def test_parallel_tiles_that_begin_earlier_write_what_they_own() -> None:
    """Without a workspace two tiles share elements, and adding nothing is a write as well."""
    sch, it, (i, j, k) = opened()
    k0, k1 = sch.split(k, [None, 4], tail="shift")
    sch.sparse_reorder(it, [k0, i, j, k1])
    sch.parallelize(k0)
    text = run(sch)
    assert "T.parallel((feat + 3) // 4)" in text
    assert "if T.likely(T.min(vk0 * 4, feat - 4) + vk1 >= vk0 * 4):" in text
    assert "Select" not in text


def test_a_reduction_over_tiles_that_begin_earlier_keeps_its_terms_once() -> None:
    sch, it, (i, j, f) = opened(program("sddmm"), "sddmm")
    f0, f1 = sch.split(f, [None, 4], tail="shift")
    assert "T.Select(" in run(sch, "sddmm")
    sch, it, (i, j, f) = opened(program("sddmm"), "sddmm")
    f0, f1 = sch.split(f, [None, 4], tail="shift")
    sch.precompute("OUT", j, [])  # begins anew around all tiles, not for each
    assert "T.Select(" in run(sch, "sddmm")


# -- the trace ------------------------------------------------------------------------------------


def all_of_them() -> Any:
    sch, it, (i, j, k) = opened()
    sch.bound(k, 2, "min")
    o, i = sch.divide(i, "blocks", by="work", default=4)
    p, v = sch.split(k, [None, 2], tail="shift")
    sch.sparse_reorder(it, [p, o, i, j, v])
    start, _, _ = sch.precompute("C", i, (v,), lanes=(), dtype="float64", name=None)
    (copy,) = sch.precompute("B", p, ["J_", v], scope="global")
    sch.annotate(copy, "note", "kept")
    (lane,) = sch.get_sp_iters(start)
    sch.bound(lane, 2, "exact")
    sch.parallelize([sch.get_sp_iters(it)[0]])
    return sch


def test_the_trace_prints_and_replays() -> None:
    sch = all_of_them()
    text = sch.trace.as_python()
    assert "v8, v9, v10 = sch.precompute('C', v5, [v7], lanes=[], dtype='float64')" in text
    assert "(v11,) = sch.precompute('B', v6, ['J_', v7], scope='global')" in text
    assert "None" not in text.replace("[None, 2]", "")
    names: dict[str, Any] = {}
    exec(text, names)
    other = sparsetir.Schedule(program())
    names["apply"](other)
    for again in (other, sch.trace.apply(program())):
        assert tvm_ffi.structural_equal(again.func, sch.func, map_free_vars=True)
        assert again.trace.as_python() == text
    wider = sch.trace.apply(program(dtype="float64"))
    assert 'B_ws = T.alloc_sparse_buffer((J_, K1), "float64")' in wider.func.script()


def test_arguments_are_json() -> None:
    def plain(value: Any) -> Any:
        if isinstance(value, SpIter | SparseIterationRef):
            return value.name
        return [plain(v) for v in value] if isinstance(value, list | tuple) else value

    for step in all_of_them().trace.instructions:
        given = [*map(plain, step.inputs), {k: plain(v) for k, v in step.options.items()}]
        assert json.loads(json.dumps(given)) == given


def test_one_trace_over_both_stages() -> None:
    sch, it, (i, j, k) = opened()
    k0, k1 = sch.split(k, [None, 4])
    sch.sparse_reorder(it, [i, k0, j, k1])
    _, reduce, _ = sch.precompute("C", k0, [k1])
    second = sch.lower()
    _, lanes = second.get_loops(second.get_sblock("spmm_reduce0"))
    second.unroll(lanes)
    third = sch.rewrite(exact_constants)
    third.vectorize(third.get_loops(third.get_sblock("spmm_write0"))[-1])
    text = sch.trace.as_python()
    assert text.splitlines()[6:] == [
        "    sch2 = sch.lower()",
        '    b0 = sch2.get_sblock(name="spmm_reduce0", func_name="main")',
        "    l1, l2 = sch2.get_loops(block=b0)",
        "    sch2.unroll(loop=l2)",
        "    from sparsetir.schedules.passes.exact_constants import exact_constants",
        "    sch2 = sch.rewrite(exact_constants)",
        '    b0 = sch2.get_sblock(name="spmm_write0", func_name="main")',
        "    l1, = sch2.get_loops(block=b0)",
        "    sch2.vectorize(loop=l1)",
    ]
    names: dict[str, Any] = {}
    exec(text, names)
    other = sparsetir.Schedule(program())
    names["apply"](other)
    for again in (other, sch.trace.apply(program())):
        assert tvm_ffi.structural_equal(again.stage_two.mod, sch.stage_two.mod)
        assert again.trace.as_python() == text
    with pytest.raises(ScheduleError, match="split: the schedule has gone on to stage II, which"):
        sch.split(k, [None, 2])


def test_a_pass_without_a_name_is_said_to_be_one() -> None:
    sch, _, _ = opened()
    sch.rewrite(lambda func: func)
    assert "    # test_a_pass" in sch.trace.as_python()
    assert sch.trace.apply(program()).stage_two is not None
