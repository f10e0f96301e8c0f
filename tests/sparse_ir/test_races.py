"""Race facts ride on blocks, and loops run in parallel by them alone."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from tvm import s_tir
from tvm.script import tirx as TIR

import sparsetir
from programs import PROGRAMS
from sparsetir import ScheduleError
from sparsetir.schedules.passes.parallel_loops import materialize_loop_kinds, run_in_parallel
from sparsetir.sparse_ir.nodes import walk
from sparsetir.sparse_ir.races import RACES


def lowered(name: str) -> Any:
    return sparsetir.lower_sparse_iter(PROGRAMS[name].make("float32", "int32"))


def facts(func: Any) -> dict[str, dict[str, list[str]]]:
    """The race facts of each block, by its name."""
    by_block: dict[str, dict[str, list[str]]] = {}

    def visit(node: Any) -> None:
        if isinstance(node, s_tir.SBlock) and RACES in node.annotations:
            races = node.annotations[RACES]
            by_block[str(node.name_hint)] = {str(k): [*v] for k, v in races.items()}

    walk(func.body, visit)
    return by_block


def loops(sch: Any, block: str) -> list[Any]:
    return sch.get_loops(sch.get_sblock(block))


def schedule(name: str) -> Any:
    return s_tir.Schedule(s_tir.renew_defs(lowered(name)))


def test_facts_of_spmm() -> None:
    want = {"spmm0": {"vi": ["free"]}, "spmm1": {"vj": ["reduction", "C"], "vk": ["free"]}}
    func = lowered("spmm")
    assert facts(func) == want
    again = tvm.ir.load_json(tvm.ir.save_json(func))
    assert facts(again) == want
    assert facts(sparsetir.lower_sparse_buffer(func)) == {}


def test_a_reduction_is_refused() -> None:
    sch = schedule("spmm")
    j = loops(sch, "spmm1")[0]
    message = (
        r"loop 'j' as parallel: block 'spmm1': 'vj' is no free variable \(reduction\): visits add "
        r"to the same elements of 'C'; choose a loop over spatial axes\n  in for j in range\(.*\)"
    )
    with pytest.raises(ScheduleError, match=message):
        run_in_parallel(sch, j, "parallel")
    run_in_parallel(sch, j, "parallel", race="ignore")
    text = materialize_loop_kinds(sch.mod["main"]).script()
    assert "for j in T.parallel(" in text


TILES = """
@T.prim_func
def tiles(a: T.handle, c: T.handle, m: T.int32, n: T.int32, blocks: T.int32):
    O = T.dense_fixed(blocks)
    L = T.dense_fixed(4)
    I = T.dense_fixed(m)
    J = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    C = T.match_sparse_buffer(c, (I,), "float32")
    W = T.alloc_sparse_buffer((L,), "float32", scope="local")
    with T.sp_iter([O], "S", "tile") as [o]:
        T.sp_iter_attr({{"ordered": 1}})
{body}
"""
START = """
        with T.sp_iter([L], "S", "start") as [l]:
            W[l] = 0.0
"""
SUM = """
        with T.sp_iter([J], "R", "sums") as [j]:
            with T.sp_iter([L], "S", "add") as [l]:
                W[l] = W[l] + A[o * 4 + l, j]
"""
WRITE = """
        with T.sp_iter([L], "S", "write") as [l]:
            C[o * 4 + l] = W[l]
"""


IN_TILES = TILES.replace(
    "    L = T.dense_fixed(4)\n",
    "    L = T.dense_fixed(4)\n    P = T.dense_fixed(2)\n    Q = T.dense_fixed(2)\n"
    "    S = T.sparse_fixed(O, (2, 2), indices)\n    Z = T.dense_fixed(zeros)\n",
).replace("n: T.int32", "n: T.int32, zeros: T.int32, indices: T.handle")
NESTED = """
        with T.sp_iter([P], "S", "start") as [p]:
            with T.sp_iter([Q], "S", "start_inner") as [q]:
                W[p * 2 + q] = 0.0
"""


def nested(*pairs: tuple[str, str]) -> str:
    text = NESTED
    for old, new in pairs:
        text = text.replace(old, new)
    return text


PAIRS = START.replace("[L]", "[P, Q]").replace('"S"', '"SS"').replace("[l]", "[p, q]", 1)
# What begins a workspace, and whether visits then have it for themselves.
BEGUN = {
    "no start": ("", False),
    "one element": (START.replace("W[l] = 0.0", "W[0] = 0.0"), False),
    "a condition": ("        if o > 0:\n" + START.replace("\n    ", "\n        "), False),
    "nested": (NESTED, True),
    "columns first": (nested(("W[p * 2 + q]", "W[q * 2 + p]")), True),
    "one iteration": (PAIRS.replace("W[l]", "W[q + p * 2]"), True),
    "a gap": (nested(("p * 2 + q", "p * 3 + q")), False),  # 2 is left out
    "too few": (nested(("p * 2 + q", "p + q")), False),
    "moved": (nested(("p * 2 + q", "p * 2 + q + 1")), False),
    "no sum": (nested(("p * 2 + q", "p * 2 + q * q")), False),
    "a sparse axis": (nested(("[P]", "[S]")), False),  # stores some positions only
    "perhaps no visits": (
        nested(("[Q]", "[Z, Q]"), ('"S", "start_inner"', '"SS", "start_inner"'),
               ("as [q]", "as [z, q]")), False),
}  # fmt: skip


@pytest.mark.parametrize("name", BEGUN)
def test_which_workspaces_are_private(name: str) -> None:
    start, private = BEGUN[name]
    func = sparsetir.from_source(IN_TILES.format(body=start + SUM + WRITE))
    fact = ["free"] if private else ["scatter", "W"]
    assert facts(sparsetir.lower_sparse_iter(func))["tile0"]["vo"] == fact


@TIR.prim_func(s_tir=True)
def halves(x: TIR.Buffer((8,), "float32"), y: TIR.Buffer((8,), "float32")):
    for i in range(8):
        with TIR.sblock("half"):
            vi = TIR.axis.spatial(4, i // 2)
            TIR.sblock_attr({"sparsetir.races": {"vi": ["free"]}})
            x[vi] = TIR.float32(1)
    for i, j in TIR.grid(4, 4):
        with TIR.sblock("halo"):
            vi = TIR.axis.spatial(7, i + j)
            TIR.sblock_attr({"sparsetir.races": {"vi": ["free"]}})
            y[vi] = TIR.float32(1)
    for i, j in TIR.grid(4, 4):
        with TIR.sblock("again"):
            vj = TIR.axis.spatial(4, j)
            TIR.sblock_attr({"sparsetir.races": {"vj": ["free"]}})
            y[vj] = TIR.float32(2)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("half", "block 'half': visits may share 'vi' = i // 2; pass race=\"ignore\""),
        ("halo", "block 'halo': visits may share 'vi' = i \\+ j; pass race=\"ignore\""),
        ("again", "block 'again': each visit writes the same elements of 'y'; pass race"),
    ],
)
def test_free_variables_shared_by_visits(block: str, message: str) -> None:
    sch = s_tir.Schedule(halves)
    with pytest.raises(ScheduleError, match=message):
        run_in_parallel(sch, loops(sch, block)[0], "parallel")
