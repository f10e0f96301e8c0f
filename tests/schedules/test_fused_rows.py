"""Steps over the same rows, one after the other: one visit of each row, where that is the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

import sparsetir
from drawing import examples
from programs import copied
from small import arguments_of, small
from sparsetir.schedules.passes.fused_rows import fused_rows
from sparsetir.sparse_ir.nodes import sparse_iterations

AXES = "H = T.dense_fixed(heads)"
BUFFERS = {"X": "I J H", "Y": "I J H", "Z": "N H", "OUT": "I H"}
FLAT = """
TOP = T.alloc_sparse_buffer((I, H), "float32")
with T.sp_iter([I, J, H], "SRS", "top") as [i, j, h]:
    with T.init():
        TOP[i, h] = -100.0
    TOP[i, h] = T.max(TOP[i, h], X[i, j, h])
with T.sp_iter([H, I, J], "SSS", "less") as [h, i, j]:
    Y[i, j, h] = X[i, j, h] - TOP[i, h]
"""
IN_ROWS = """
TOP = T.alloc_sparse_buffer((H,), "float32")
with T.sp_iter([I], "S", "rows") as [i]:
    with T.sp_iter([J, H], "RS", "top") as [j, h]:
        with T.init():
            TOP[h] = -100.0
        TOP[h] = T.max(TOP[h], X[i, j, h])
    with T.sp_iter([J, H], "SS", "less") as [j, h]:
        Y[i, j, h] = X[i, j, h] - TOP[h]
"""
IN_HEADS = """
TOP = T.alloc_sparse_buffer((), "float32")
with T.sp_iter([H, I], "SS", "rows") as [h, i]:
    with T.sp_iter([J], "R", "top") as [j]:
        with T.init():
            TOP[()] = -100.0
        TOP[()] = T.max(TOP[()], X[i, j, h])
    with T.sp_iter([J], "S", "less") as [j]:
        Y[i, j, h] = X[i, j, h] - TOP[()]
"""
KEPT = {
    "the array is a result": FLAT.replace('TOP = T.alloc_sparse_buffer((I, H), "float32")', "")
    .replace("TOP", "OUT"),
    "used outside": FLAT + """
with T.sp_iter([I, H], "SS", "after") as [i, h]:
    OUT[i, h] = TOP[i, h]
with T.sp_iter([N, H], "SS", "before") as [x, h]:
    Z[x, h] = TOP[x, h]
""",
    "other rows": FLAT.replace("- TOP[i, h]", "- TOP[j, h]"),
    "many features of other rows": FLAT.replace("X[i, j, h])", "Z[j, h])"),
    "in their order": FLAT.replace(
        "    Y[i", '    T.sp_iter_attr({"ordered": 1})\n    Y[i'),
}  # fmt: skip


def loops(func):
    return [[axis.name for axis in it.axes] for it in sparse_iterations(func)]


def check(func, heads=3, seed=0):
    """Compare with the interpreter, for a matrix with a full row, an empty one and others."""
    where = np.random.default_rng(seed).random((9, 9)) < 0.3
    where[2], where[-1] = True, False
    sizes = {"heads": heads} if any(p.name == "heads" for p in func.params) else {}
    args = arguments_of(func, where, {"H": heads}, **sizes)
    mine, exact = copied(args), copied(args)
    sparsetir.build(func)(**mine)
    sparsetir.interpret(func, exact)
    for name in args:
        np.testing.assert_array_equal(mine[name], exact[name], err_msg=f"{name}\n{func.script()}")


@pytest.mark.parametrize("body", [FLAT, IN_ROWS, IN_HEADS])
def test_all_ways_to_write_them_become_one(body):
    func = small("f", body, AXES, X="I J H", Y="I J H")
    fused = fused_rows(func)
    assert loops(fused) == [["I", "H"], ["J"], ["J"]]
    assert [(b.name, len(b.axes)) for b in fused.buffers if b.handle is None][0][1] == 0
    for heads in (1, 3, 8, 19):
        check(func, heads)


def test_steps_by_hand_and_back():
    """`fuse_steps` of rows and heads, and `distribute` of heads; the trace replays."""
    func = small("f", FLAT, "H = T.dense_fixed(3)", X="I J H", Y="I J H")
    sch = sparsetir.Schedule(func)
    steps = [sch.get_sparse_iteration(name) for name in ("top", "less")]
    i, _, h = sch.get_sp_iters(steps[0])
    rows = sch.fuse_steps(steps, [i, h])
    assert loops(sch.func) == [["I", "H"], ["J"], ["J"]]
    check(sch.func)
    sch.distribute(sch.get_sp_iters(rows)[1:])
    assert loops(sch.func) == [["I"], ["J", "H"], ["J", "H"]]
    check(sch.func)
    assert sch.trace.apply(func).func.script() == sch.func.script()


@pytest.mark.parametrize("why", KEPT)
def test_what_is_no_visit_of_a_row(why):
    func = small("f", KEPT[why], AXES, **{n: x for n, x in BUFFERS.items() if n in KEPT[why]})
    assert loops(fused_rows(func)) == loops(func)
    for heads in (3, 40):
        check(func, heads)


def test_few_features_of_other_rows():
    """As many as one visit may gather: known, or in a version of the kernel."""
    body = KEPT["many features of other rows"]
    built = sparsetir.build(small("f", body, AXES, X="I J H", Y="I J H", Z="N H"))
    assert 'T.sblock("few")' in built.stages["II scheduled"].script()
    for heads, count in ((4, 3), (64, 2)):
        func = small("f", body, f"H = T.dense_fixed({heads})", X="I J H", Y="I J H", Z="N H")
        assert len(loops(fused_rows(func))) == count
        check(func, heads)


EACH = 'with T.sp_iter([I, J, H], "SSS", "s{n}") as [i, j, h]:\n    Y[i, j, h] = {term}'
SUM = """with T.sp_iter([I, J, H], "SRS", "s{n}") as [i, j, h]:
    with T.init():
        {row} = {init}
    {row} = {row} {update}"""
OF_ROW = 'with T.sp_iter([I, H], "SS", "s{n}") as [i, h]:\n    {row} = {term}'
ROWS = st.sampled_from(["U[i, h]", "V[i, h]", "OUT[i, h]"])
TERMS = st.sampled_from(
    ["X[i, j, h]", "Y[i, j, h]", "U[i, h]", "V[i, h]", "Z[j, h]", "U[j, h]", "Y[i, j, h] - V[i, h]"]
)
UPDATES = ["+ {}", "- {}"]


@st.composite
def steps(draw):
    """Lines of a program whose arrays are written before they are read."""
    lines = [
        SUM.format(n="u", row="U[i, h]", init="0.0", update="+ X[i, j, h]"),
        OF_ROW.format(n="v", row="V[i, h]", term="U[i, h] + 1.0"),
        EACH.format(n="y", term="X[i, j, h] * 2.0"),
    ]
    for n in range(draw(st.integers(1, 4))):
        kind, term, row = draw(st.sampled_from([EACH, SUM, OF_ROW])), draw(TERMS), draw(ROWS)
        if kind == OF_ROW:
            term = draw(st.sampled_from(["U[i, h]", "V[i, h] - U[i, h]", "U[i, h] + V[i, h]"]))
        elif kind == SUM and row[0] in term:
            term = "X[i, j, h]"
        update = f"{draw(st.sampled_from('+-'))} ({term})"
        lines.append(kind.format(n=n, term=term, row=row, init="1.0", update=update))
    return "\n".join(lines), draw(st.sampled_from(["heads", "2", "40"]))


@examples(5, 100, program=steps(), seed=st.integers(0, 99), data=st.data())
def test_random_steps(program, seed, data):
    """By default, and fused by hand: some that follow each other, in loops of the first."""
    text, heads = program
    allocated = [f'{x} = T.alloc_sparse_buffer((I, H), "float32")' for x in "UV"]
    used = {name: over for name, over in BUFFERS.items() if f"{name}[" in text}
    func = small("f", "\n".join([*allocated, text]), f"H = T.dense_fixed({heads})", **used)
    count = 5 if heads == "heads" else int(heads)
    check(func, count, seed)
    sch = sparsetir.Schedule(func)
    every = [sch.get_sparse_iteration(it.name) for it in sparse_iterations(func)]
    begin = data.draw(st.integers(0, len(every) - 2))
    end = data.draw(st.integers(begin + 2, len(every)))
    order = data.draw(st.permutations(sch.get_sp_iters(every[begin])))
    try:
        sch.fuse_steps(every[begin:end], order[: data.draw(st.integers(1, len(order)))])
    except sparsetir.ScheduleError:
        return
    check(sch.func, count, seed)


def test_a_value_that_two_sums_set():
    """TVM separates the init of no reduction whose result another one writes."""
    body = IN_HEADS.replace("X[i, j, h]", "Z[j, h]") + IN_HEADS.split('"rows") as [h, i]:\n')[1]
    body = body.replace('"top"', '"second"', 1).replace('"less"', '"last"', 1)
    body = body.replace("Y[", "X[", 1)
    func = small("f", body, AXES, X="I J H", Y="I J H", Z="N H")
    assert loops(fused_rows(func)) == loops(func)
    for heads in (1, 5, 16):
        check(func, heads)
