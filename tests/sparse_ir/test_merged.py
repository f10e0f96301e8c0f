"""Merged axes: random programs of several sparse operands, what is refused, text of the stages."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import tvm_ffi
from hypothesis import strategies as st

import sparsetir
from drawing import examples
from merged_programs import Drawn, nested, programs
from pairs import by_turns
from programs import PROGRAMS, copied
from programs.merged import dense_of
from refusals import refusals
from small import making
from sparsetir.sparse_ir.annotations import intersected
from sparsetir.sparse_ir.nodes import sparse_iterations
from stage2 import golden, plain_text

# c[i] = sum over what both rows store.
make_dots = making("dots", """
with T.sp_iter([I, T.intersect(J1, J2)], "SR", "dots") as [i, j]:
    with T.init():
        C[i] = 0.0
    C[i] = C[i] + A[i, j] * B[i, j]
""", """
J1 = T.sparse_variable(I, (n, a_nnz), (a_ptr, a_idx))
J2 = T.sparse_variable(I, (n, b_nnz), (b_ptr, b_idx))
""", first="a a_ptr a_idx b b_ptr b_idx", A="I J1", B="I J2", C="I")  # fmt: skip


@examples(3, 500, drawn=programs())
def test_kernels(drawn: Drawn) -> None:
    """The text parses back; kernels give what the interpreter gives."""
    func = sparsetir.from_source(drawn.text)
    assert tvm_ffi.structural_equal(sparsetir.from_source(func.script()), func)
    expected = copied(drawn.arguments)
    sparsetir.interpret(func, expected)
    for built in (sparsetir.build(func), sparsetir.build(sparsetir.lower_sparse_iter(func))):
        mine = copied(drawn.arguments)
        built(**mine)
        np.testing.assert_array_equal(mine["c"], expected["c"], err_msg=drawn.text)


@examples(3, 300, drawn=nested())
def test_merged_axes_of_merged_axes(drawn: tuple[Drawn, np.ndarray, np.ndarray]) -> None:
    """The interpreter visits what NumPy says, kernels what the interpreter does; so do patterns."""
    program, visited, values = drawn
    func = sparsetir.from_source(program.text)
    assert tvm_ffi.structural_equal(sparsetir.from_source(func.script()), func)
    expected = np.where(visited, values, np.nan)
    built = sparsetir.build(func)
    for run in (partial(sparsetir.interpret, func), lambda args: built(**args)):
        mine = copied(program.arguments)
        run(mine)
        np.testing.assert_array_equal(mine["c"], expected, program.text)
    args = {n: x for n, x in program.arguments.items() if n != "c"}
    result = sparsetir.build_assembled(func, "C")(**args)
    np.testing.assert_array_equal(np.diff(result.indptr), visited.sum(axis=1), program.text)
    np.testing.assert_array_equal(result.indices, np.nonzero(visited)[1], program.text)
    np.testing.assert_array_equal(result.values, values[visited], program.text)


@examples(3, 500, drawn=programs(most=70), ratio=st.sampled_from([1, 2]))
def test_galloping(drawn: Drawn, ratio: int) -> None:
    """Pointers that gallop meet where others do, of any number of axes without padding."""
    sch = sparsetir.Schedule(sparsetir.from_source(drawn.text))
    it = sch.get_sparse_iteration("it")
    merged = {x.name: x for x in sch.get_sp_iters(it)}
    for name, padded in intersected(sparse_iterations(sch.func)[0]).items():
        if not padded:
            sch.gallop(merged[name], ratio)
    assert tvm_ffi.structural_equal(sparsetir.from_source(sch.func.script()), sch.func)
    expected, mine = copied(drawn.arguments), copied(drawn.arguments)
    sparsetir.interpret(sch.func, expected)
    sparsetir.build(sch)(**mine)
    np.testing.assert_array_equal(mine["c"], expected["c"], err_msg=drawn.text)


@pytest.mark.parametrize("idtype", ["int32", "int64"])
@pytest.mark.parametrize("ratio", by_turns([0, 1, 16], 2))
def test_long_rows(ratio: int, idtype: str) -> None:
    """All pairs of lengths: elements before, between and behind those of the other row."""
    lengths = [0, 1, 2, 3, 5, 40, 257, 999]
    rng, rows = np.random.default_rng(0), [(x, y) for x in lengths for y in lengths]
    args = {"m": len(rows), "n": 1000, "c": np.full(len(rows), np.nan, "float32")}
    for q, name in enumerate("ab"):
        picks = [np.sort(rng.permutation(1000)[: pair[q]]) for pair in rows]
        args[f"{name}_ptr"] = np.cumsum([0, *map(len, picks)]).astype(idtype)
        args[f"{name}_idx"] = np.concatenate(picks).astype(idtype)
        args[f"{name}_nnz"] = len(args[f"{name}_idx"])
        args[name] = rng.integers(-4, 5, args[f"{name}_nnz"]).astype("float32")
    sch = sparsetir.Schedule(make_dots("float32", idtype))
    sch.gallop(sch.get_sp_iters(sch.get_sparse_iteration("dots"))[1], ratio)
    sparsetir.build(sch)(**args)
    np.testing.assert_array_equal(args["c"], (dense_of(args, "a") * dense_of(args, "b")).sum(1))


HEAD = """
@T.prim_func
def f(p: T.handle, q: T.handle, r: T.handle, s: T.handle, a: T.handle, c: T.handle, m: T.int32,
      n: T.int32, z: T.int32):
    I = T.dense_fixed(m)
    J1 = T.sparse_variable(I, (n, z), (p, q))
    J2 = T.sparse_variable(I, (n, z), (r, s))
"""
ITERATION = """
    C = T.match_sparse_buffer(c, (I,))
    with T.sp_iter([I, {}], "SR", "it") as [i, j]:
        with T.init():
            C[i] = 0.0
        C[i] = C[i] + 1.0
"""


SAME = HEAD + "    K = T.dense_fixed(m)" + ITERATION.format("T.intersect(J1, T.attach(J2, K))")
LONGER = HEAD + "    K = T.dense_fixed(n)" + ITERATION.replace('[I, {}], "SR"', '[I, K, {}], "SRR"')
LONGER = LONGER.replace("[i, j]", "[i, k, j]").format("T.intersect(J1, T.attach(J2, K))")


def of(merged: str, before: str = "", old: str = "", new: str = "", more: str = "") -> None:
    """The iteration over these axes, in a program with a line more and with other text."""
    text = HEAD.replace(before, more) if before else HEAD + more
    iteration = ITERATION.replace(old, new) if old else ITERATION
    sparsetir.from_source(text + iteration.format(merged))


test_refusals = refusals(
    """
of("T.union(J1)")  # Exception: union: argument 'axes': expected at least two axes, got 1
of("T.union(J1, 3)")  # Exception: union: argument 'axes': expected an axis, got 3
of("M", more="    M = T.union(J1, J1)")
    # Exception: axis 'M' = union(J1, J1): expected two or more axes, each once
of("T.intersect(J1, J2)", "J2 = T.sparse_variable(I, (n", more="J2 = T.sparse_variable(I, (m")
    # Exception: 'J1_and_J2' = intersect(J1, J2): expected axes of one length and idtype, n and
        int32, got 'J2' of m and int32
of("T.union(J1, J2)", "(r, s))", more="(r, s), unique=False)")
    # Exception: expected axes whose coordinates increase under each parent, but 'J2' may store one
        twice (unique=False)
of("T.intersect(T.union(J1, J2), T.attach(J2, I))")
    # Exception: expected 'J2' attached in each place or none
of("T.union(J1, J2)", "J2 = T.sparse_variable(I,",
   more="I2 = T.dense_fixed(m); J2 = T.sparse_variable(I2,")
    # Exception: expected axis 'I2', its parent, before 'J2' in [I, J1_or_J2] or around it
of("M", more="    M = T.union(J1, J2); A = T.match_sparse_buffer(a, (I, M))")
    # Exception: buffer 'A': the union 'M' stores nothing; expected one of its axes [J1, J2]
of("T.fuse(I, T.union(J1, J2))", old="[I, {}]", new="[{}]")
    # Exception: the union 'J1_or_J2' cannot be fused, attached or visited in parts
of("T.union(J1, J2), J1", old='"SR", "it") as [i, j]', new='"SRR", "it") as [i, j, l]')
    # Exception: axis 'J1' is iterated twice
of("T.union(J1, J2)", old='[I, {}], "SR", "it") as [i, j]', new='[{}, I], "RS", "it") as [j, i]')
    # Exception: expected axis 'I', its parent, before 'J1_or_J2'
sparsetir.from_source(SAME)
    # Exception: expected axis 'K', which it is attached to, before 'J2'
sparsetir.from_source(LONGER)
    # Exception: attach('J2', 'K'): expected 'I', .. to be as long as
""",
    globals(),
)


def gallop(merged: str, ratio: int = 1, slots: bool = False) -> None:
    """Let pointers of an iteration's last loop gallop."""
    text = HEAD.replace(
        "J2 = T.sparse_variable(I, (n, z), (r, s))", "J2 = T.sparse_fixed(I, (n, z), r)"
    )
    sch = sparsetir.Schedule(
        sparsetir.from_source((text if slots else HEAD) + ITERATION.format(merged))
    )
    sch.gallop(sch.get_sp_iters(sch.get_sparse_iteration("it"))[-1], ratio)


test_refused_gallops = refusals(
    """
gallop("T.union(J1, J2)")
    # ScheduleError: gallop: argument 'loop': expected one over an intersection, got 'J1_or_J2'
gallop("J1")  # ScheduleError: expected one over an intersection, got 'J1'
gallop("T.intersect(J1, J2)", -1)  # ScheduleError: argument 'ratio': expected 0 or more, got -1
gallop("T.intersect(J1, J2)", slots=True)
    # ScheduleError: gallop: annotation 'gallop': expected an intersection whose list of axes
        with padding is empty in {'J1_and_J2': ['J2']}, and a ratio of 0 or more
""",
    globals(),
)


MOVES = {
    "split": lambda sch, loop: sch.split(loop, [None, 4]),
    "fuse": lambda sch, loop: sch.sparse_fuse(
        sch.get_sparse_iteration("it"), sch.get_sp_iters(sch.get_sparse_iteration("it"))
    ),
    "parallelize": lambda sch, loop: sch.parallelize(loop, "cpu"),
    "divide": lambda sch, loop: sch.divide(loop, 2, by="positions"),
    "strip_mine_rows": lambda sch, loop: sch.strip_mine_rows(loop, 2),
    "ranges": lambda sch, loop: sch.ranges(loop, 2, 3),
    "peel": lambda sch, loop: sch.peel(loop, 2),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("how", ["union", "intersect"])
def test_the_loop_itself_stays_as_it_is(move: str, how: str) -> None:
    sch = sparsetir.Schedule(sparsetir.from_source(HEAD + ITERATION.format(f"T.{how}(J1, J2)")))
    _, loop = sch.get_sp_iters(sch.get_sparse_iteration("it"))
    before = sch.func
    with pytest.raises(sparsetir.ScheduleError, match=r"J1_(or|and)_J2") as caught:
        MOVES[move](sch, loop)
    assert "in T.sp_iter([" in str(caught.value) and sch.func is before


@pytest.mark.parametrize("name", ["add_csr", "intersect_spmm"])
def test_golden(name: str) -> None:
    func = PROGRAMS[name].make("float32", "int32")
    assert len(sparse_iterations(func)) == 1
    stage_two = sparsetir.lower_sparse_iter(func)
    assert plain_text(stage_two) == golden(f"{name}_stage2")
    assert plain_text(sparsetir.lower_sparse_buffer(stage_two)) == golden(f"{name}_stage3")


def test_golden_galloping() -> None:
    sch = sparsetir.Schedule(make_dots("float32", "int32"))
    sch.gallop(sch.get_sp_iters(sch.get_sparse_iteration("dots"))[1])
    assert plain_text(sparsetir.lower_sparse_iter(sch.func)) == golden("gallop_stage2")
