"""Merged axes: random programs of several sparse operands, what is refused, text of the stages."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import tvm_ffi
from hypothesis import strategies as st

import sparsetir
from drawing import examples
from merged_programs import Drawn, nested, programs
from pairs import by_turns
from programs import PROGRAMS, copied
from programs.merged import dense_of, stored_of
from refusals import refusals
from schedule_common import gives
from small import making
from sparse_programs import Tensors
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


# Operands whose parents are no merged axis, loops, and what is computed.
ELSEWHERE = {
    "csr times csc": ("A=ds:ik B=ds:jk", "i=IA; j=JB; k=T.intersect(KA, KB)", "ik,jk->ij"),
    "dcsr times dcsr": ("A=ss:ik B=ss:kj", "i=IA; k=T.intersect(KA, KB); j=JB", "ik,jk->ij"),
    "dcsr plus vector": ("A=ss:ij B=s:j", "i=IA; j=T.union(JA, JB)", ""),
    "fibers times rows": ("A=sss:ijk B=ds:ik", "i=T.intersect(IA, IB); j=JA; "
                          "k=T.intersect(KA, KB)", "ijk,ik->ij"),
}  # fmt: skip


@pytest.mark.parametrize("case", ELSEWHERE)
def test_axes_under_different_parents(case: str) -> None:
    """Dense results of the interpreter and kernels; patterns have what both store."""
    operands, loops, how = ELSEWHERE[case]
    kinds = "S" + "".join("SR"[x[0] == "k"] for x in loops.split("; "))
    body = "{A} + {B}" if not how else "{C} + {A} * {B}"
    body = f"{{C}} = {body}"

    def made(levels: str, **drawn: Any) -> Tensors:
        case_tensors = Tensors(*operands.split(), **drawn).result(levels, "ij")
        return case_tensors.iterate(f"o=O; {loops}", kinds, body, "0.0")

    func, sparse = (sparsetir.from_source(made(levels).text) for levels in ("dd", "ss"))
    kernel, assembled = sparsetir.build(func), sparsetir.build_assembled(sparse)
    for n, density in enumerate((0.5, 0.1, 0.0, 1.0)):
        tensors = made("ss", seed=n, density=density)
        (a, b), masks = tensors.dense.values(), [x.astype(int) for x in tensors.mask.values()]
        rows = masks[0].any(axis=1)[:, None]
        expected = np.einsum(how, a, b) if how else a + rows * b
        stored = np.einsum(how, *masks) if how else masks[0] + rows * masks[1]
        for run in (partial(sparsetir.interpret, func), lambda args: kernel(**args)):
            mine = {**tensors.args, "c": np.full(expected.shape, np.nan, "float32")}
            run(mine)
            np.testing.assert_array_equal(mine["c"], expected)
        result, mask = tensors.decoded(assembled(**tensors.args))
        np.testing.assert_array_equal(mask, stored > 0)
        np.testing.assert_array_equal(result, expected)


# Two axes that read the arrays of others, loops, and what is computed of a square A.
TWICE = {
    "triangles": (
        "A=ds:ij", "K0 = T.dense_fixed(nj, '{0}')", "K1 = T.sparse_variable(IA, {1}, '{0}')",
        "K2 = T.sparse_variable(K0, {1}, '{0}')", "i=IA; j=JA; k=T.intersect(K1, T.attach(K2, JA))",
        "A[i, j] * A[i, k] * A[j, k]", "ij,ik,jk->ij",
    ),
    "square": (
        "A=ss:ik", "I2 = T.sparse_variable(O, (nj, a0_nnz), (a0_ptr, a0_idx), '{0}')",
        "J2 = T.sparse_variable(I2, {1}, '{0}')", "i=IA; k=T.intersect(KA, I2); j=J2",
        "A[o, i, k] * A[o, k, j]", "ik,kj->ij",
    ),
}  # fmt: skip


@pytest.mark.parametrize("idtype", ["int32", "int64"])
@pytest.mark.parametrize("case", TWICE)
def test_arrays_of_two_axes(case: str, idtype: str) -> None:
    """Axes under equal parents are at each other's positions, without a search."""
    operand, *axes, loops, term, how = TWICE[case]
    kinds = "S" + "".join("SR"[x[0] == "k"] for x in loops.split("; "))

    def made(levels: str, **drawn: Any) -> Tensors:
        sizes = dict.fromkeys("ijk", 7)
        operands = Tensors(operand, idtype=idtype, sizes=sizes, **drawn).result(levels, "ij")
        operands.declare(*(x.format(idtype, "(nj, a1_nnz), (a1_ptr, a1_idx)") for x in axes))
        operands.lines = [re.sub(r"\bn[ik]\b", "nj", line) for line in operands.lines]
        return operands.iterate(f"o=O; {loops}", kinds, f"{{C}} = {{C}} + {term}", "0.0")

    func, sparse = (sparsetir.from_source(made(levels).text) for levels in ("dd", "ss"))
    kernel, assembled = sparsetir.build(func), sparsetir.build_assembled(sparse)
    assert "find" not in kernel.stages["II"].script()
    for n, density in enumerate((0.5, 0.1, 0.0, 1.0)):
        tensors = made("ss", seed=n, density=density)
        expected = np.einsum(how, *[tensors.dense["A"]] * (how.count(",") + 1))
        for run in (partial(sparsetir.interpret, func), lambda args: kernel(**args)):
            mine = {**tensors.args, "c": np.full(expected.shape, np.nan, "float32")}
            run(mine)
            np.testing.assert_array_equal(mine["c"], expected)
        result, mask = tensors.decoded(assembled(**tensors.args))
        np.testing.assert_array_equal(mask, expected > 0)
        np.testing.assert_array_equal(result, expected)


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


@examples(12, 200, drawn=programs())
def test_interpreter_against_arrays(drawn: Drawn) -> None:
    """The interpreter is the oracle: its results, from arrays with zeros for what is not stored."""
    func = sparsetir.from_source(drawn.text)
    expected = copied(drawn.arguments)
    sparsetir.interpret(func, expected)
    np.testing.assert_array_equal(dense_result(drawn), expected["c"], err_msg=drawn.text)


def dense_result(drawn: Drawn) -> np.ndarray:
    """The result of a drawn program, computed with dense arrays."""
    args, text = drawn.arguments, drawn.text
    m, n = args["m"], args["n"]
    arrays: dict[str, np.ndarray] = {}
    stored: dict[str, np.ndarray] = {}
    has_row: dict[str, np.ndarray] = {}
    for x in (x for x in "abd" if x in args):
        rows = args.get(f"{x}_iidx", np.arange(m))
        here, dense = np.zeros((m, n), bool), np.zeros((m, n))
        if f"{x}_cols" in args:
            slots = args[f"{x}_idx"].reshape(len(rows), args[f"{x}_cols"])
            row_of, columns = np.repeat(rows, slots.shape[1]), slots.reshape(-1)
        elif f"{x}_ptr" in args:
            counts = np.diff(args[f"{x}_ptr"])
            row_of = np.repeat(rows, counts)
            columns = np.concatenate([np.zeros(0, int), *map(np.arange, counts)])
            columns = args.get(f"{x}_idx", columns)
        else:
            row_of, columns = np.repeat(rows, n), np.tile(np.arange(n), len(rows))
        keep = columns >= 0
        here[row_of[keep], columns[keep]] = True
        here |= (
            f"J{x} = T.dense_fixed" in text
        )  # an independent axis has all, whatever the rows are
        dense[row_of[keep], columns[keep]] = args[x].reshape(-1)[keep]
        arrays[x.upper()], stored[x] = dense, here
        has_row[x] = np.isin(np.arange(m), rows)
    combine = {"union": np.logical_or.reduce, "intersect": np.logical_and.reduce}
    rows_how = re.search(r"R = T\.(\w+)\(", text)
    columns_how = re.search(r"(?:R|I), T\.(\w+)\(J", text)
    assert columns_how is not None
    visited = combine[columns_how[1]](list(stored.values()))
    if rows_how is not None:
        visited &= combine[rows_how[1]](list(has_row.values()))[:, None]
    line = text.splitlines()[-1].split(" = ", 1)[1]
    expression = re.sub(r"^C\[[^]]*\] \+ ", "", line)
    names = {**arrays, "T": np}
    expression = re.sub(r"\b([ABD])\[[^]]*\]", r"\1[:, :, None]", expression)
    expression = expression.replace("W[j, k]", "W[None]").replace("T.max", "T.maximum")
    if "w" in args:
        names["W"] = args["w"].astype("float64")
    values = eval(expression, names)
    values = np.broadcast_to(values, (m, n, values.shape[-1]))
    target = re.search(r"C\[([^]]*)\]", text.splitlines()[-1])
    assert target is not None
    values = values if "k" in target[1] else values[..., 0]
    mask = visited.reshape(m, n, *[1] * (values.ndim - 2))
    if "j" not in target[1]:
        return np.where(mask, values, 0).sum(axis=1)
    outside = 0.0 if "T.init" in text else np.nan
    return np.where(mask, values, outside)


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


@pytest.mark.parametrize("wrt", ["a", "b", "d"])
def test_gradients(wrt: str) -> None:
    """Gradients of C = (A * B) D over the intersection of A and B; zero elsewhere."""
    program = PROGRAMS["intersect_spmm"]
    rng = np.random.default_rng(0)
    args = program.inputs(rng, "small", "float64", "int32")
    grad_c = rng.random(args["c"].shape)
    dense = {name: dense_of(args, name) for name in "ab"}
    both = stored_of(args, "a") & stored_of(args, "b")
    if wrt == "d":
        weights = np.where(both, dense["a"] * dense["b"], 0)
        expected = weights.T @ grad_c
    else:
        other = dense["b" if wrt == "a" else "a"]
        rows = np.repeat(np.arange(args["m"]), np.diff(args[f"{wrt}_ptr"]))
        full = np.where(both, other * (grad_c @ args["d"].T), 0)
        expected = full[rows, args[f"{wrt}_idx"]]
    func = sparsetir.gradient(program.make("float64", "int32"), wrt, transpose=wrt != "d")
    inputs = {**args, "grad_c": grad_c, f"grad_{wrt}": args[wrt]}
    gives(func, inputs, {f"grad_{wrt}": expected}, 1e-12, 1e-12)


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
