"""Intersections by a table of a row, and sums over all rows in parts: defaults and primitive."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparsetir
from programs import copied
from refusals import refusals
from small import making
from sparsetir.schedules.passes.lookups import lookups
from sparsetir.schedules.passes.partial_sums import partial_sums
from sparsetir.sparse_ir.nodes import SparseFunc

AXES = """
J = T.sparse_variable(I, (n, g_nnz), (g_ptr, g_idx))
K1 = T.sparse_variable(I, (feat, b_nnz), (b_ptr, b_idx))
N = T.dense_fixed(n)
K2 = T.sparse_variable(N, (feat, a_nnz), (a_ptr, a_idx))
"""
OVER = "[I, J, T.intersect(T.attach(K2, J), K1)]"
# By name: the body, and the axes of the result.
BODIES = {
    "all of it": ("", f"""
with T.sp_iter({OVER}, "RRR", "f") as [i, j, k]:
    with T.init():
        OUT[()] = 1.0
    OUT[()] = OUT[()] + G[i, j] * A[j, k] * B[i, k]
"""),
    "rows": ("I", f"""
with T.sp_iter({OVER}, "SRR", "f") as [i, j, k]:
    with T.init():
        OUT[i] = -T.infinity("float32")
    OUT[i] = T.max(OUT[i], G[i, j] * A[j, k] - B[i, k])
"""),
    "elements, added to": ("I J", f"""
with T.sp_iter({OVER}, "SSR", "f") as [i, j, k]:
    OUT[i, j] = OUT[i, j] + A[j, k] * B[i, k]
"""),
    "a sum under a condition": ("I", f"""
with T.sp_iter({OVER}, "SRR", "f") as [i, j, k]:
    if G[i, j] > 0.0:
        OUT[i] = OUT[i] + A[j, k] * B[i, k]
"""),
    "a row that is searched": ("I", """
with T.sp_iter([I, J, T.attach(K2, J)], "SRR", "f") as [i, j, k]:
    with T.init():
        OUT[i] = 0.0
    OUT[i] = OUT[i] + G[i, j] * (A[j, k] - B[i, k])
"""),
    "elements whose row is searched": ("I J", """
with T.sp_iter([T.fuse(I, J), T.attach(K2, J)], "SSR", "f") as [i, j, k]:
    with T.init():
        OUT[i, j] = 0.0
    OUT[i, j] = OUT[i, j] + A[j, k] * B[i, k]
"""),
    "elements of another matrix": ("N K2", """
with T.sp_iter([I, J, T.attach(K2, J)], "RSS", "f") as [i, j, k]:
    OUT[j, k] = OUT[j, k] + G[i, j] * B[i, k]
"""),
    "the pattern alone": ("", f"""
with T.sp_iter({OVER}, "RRR", "f") as [i, j, k]:
    OUT[()] = OUT[()] + 1.0
"""),
}  # fmt: skip


def program(name: str, idtype: str = "int32") -> SparseFunc:
    axes, body = BODIES[name]
    buffers = {"G": "I J", "A": "N K2", "B": "I K1"}
    used = {x: of for x, of in buffers.items() if f"{x}[" in body}
    return making("f", body, AXES, **used, OUT=axes)("float32", idtype)


def csr(rng: Any, m: int, n: int, density: float, idtype: str, strange: bool) -> dict[str, Any]:
    """A pattern with empty rows and a dense one, and values; strange: with NaN and infinity."""
    where = rng.random((m, n)) < density
    if m > 2 and density:
        where[0], where[1] = False, True
    values = rng.integers(-4, 5, int(where.sum())).astype("float32")
    if strange and values.size:
        values[rng.integers(0, values.size, 3)] = [np.nan, np.inf, -np.inf]
    ptr = np.cumsum([0, *where.sum(1)]).astype(idtype)
    return {"": values, "_ptr": ptr, "_idx": np.nonzero(where)[1].astype(idtype),
            "_nnz": int(where.sum())}  # fmt: skip


def arguments(
    func: SparseFunc, shape: tuple[int, int, int], density: float, idtype: str, strange: bool
) -> dict[str, Any]:  # fmt: skip
    rng, (m, n, feat) = np.random.default_rng(sum(shape)), shape
    args: dict[str, Any] = {"m": m, "n": n, "feat": feat}
    for name, (rows, cols) in {"g": (m, n), "a": (n, feat), "b": (m, feat)}.items():
        args |= {name + k: v for k, v in csr(rng, rows, cols, density, idtype, strange).items()}
    size = {"": (), "I": (m,), "I J": (args["g_nnz"],), "N K2": (args["a_nnz"],)}
    axes = " ".join(a.name for a in func.buffer("OUT").axes or ())
    args["out"] = np.full(size[axes], 2.0, "float32")
    return {str(p.name): args[str(p.name)] for p in func.params}


@pytest.mark.parametrize("strange", [False, True])
@pytest.mark.parametrize("idtype", ["int32", "int64"])
@pytest.mark.parametrize("density", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("shape", [(40, 30, 50), (1, 1, 1), (7, 1, 300), (64, 17, 3)])
@pytest.mark.parametrize("name", BODIES)
def test_default_of_intersections(
    name: str, shape: tuple[int, int, int], density: float, idtype: str, strange: bool
) -> None:
    if strange and name == "rows":
        pytest.skip("the greatest of NaN and numbers depends on the order of visits")
    func = program(name, idtype)
    assert lookups(func, 1) is not None
    args = arguments(func, shape, density, idtype, strange)
    mine, expected = copied(args), copied(args)
    sparsetir.interpret(func, expected)
    sparsetir.build(func)(**mine)
    np.testing.assert_allclose(mine["out"], expected["out"], rtol=1e-4, atol=1e-4)


def test_located_by_hand() -> None:
    sch = sparsetir.Schedule(program("all of it"))
    *_, loop = sch.get_sp_iters(sch.get_sparse_iteration("f"))
    clear, fill, rest = sch.locate(loop)
    assert [x.name for x in (clear, fill, rest)] == ["K1_clear", "K1_fill", "f_rest"]
    text = sch.func.script()
    assert "K1_at[k] = i" in text and "T.Select(K1_at[k] == i, " in text
    args = arguments(sch.func, (40, 30, 50), 0.2, "int32", False)
    mine, expected = copied(args), copied(args)
    sparsetir.interpret(sch.func, expected)
    sparsetir.build(sch)(**mine)
    np.testing.assert_allclose(mine["out"], expected["out"], rtol=1e-5)


def locate(over: str, kinds: str, variables: str, at: int | None = None, last: int = -1) -> None:
    """Locate the loop `last` of an iteration, with tables in the visits of the loop `at`."""
    body = f"""
with T.sp_iter([{over}], "{kinds}", "f") as [{variables}]:
    OUT[()] = OUT[()] + 1.0
"""
    sch = sparsetir.Schedule(making("f", body, AXES + "K3 = T.sparse_variable(I, (feat, c_nnz), "
                                    "(c_ptr, c_idx))\n", OUT="")("float32", "int32"))  # fmt: skip
    loops = sch.get_sp_iters(sch.get_sparse_iteration("f"))
    sch.locate(loops[last], *([] if at is None else [loops[at]]))


test_refused_lookups = refusals(
    """
locate("I, J, T.union(T.attach(K2, J), K1)", "RRR", "i, j, k")
    # ScheduleError: locate: expected a loop over an intersection of two axes
locate("I, J", "RR", "i, j")
    # ScheduleError: locate: expected a loop over an intersection of two axes, or one at whose
locate("I, J, T.attach(K2, J)", "RRR", "i, j, k")
    # ScheduleError: a loop between, got 'K2'
locate("I, T.intersect(K1, K3)", "RR", "i, k")
    # ScheduleError: locate: expected one axis of the intersection under a root
locate("I, J, T.intersect(T.attach(K2, J), K1)", "RRR", "i, j, k", at=1)
    # ScheduleError: locate: expected one axis of the intersection under a root
""",
    globals(),
)

SUMS = {
    "all": ("", "[I, J]", "RR", "i, j", "OUT[()]", "OUT[()] + A[i, j] * X[j, 0]", "+"),
    "features": ("F", "[I, J, F]", "RRS", "i, j, f", "OUT[f]", "OUT[f] + A[i, j] * X[j, f]", "+"),
    "the greatest": ("", "[I, J]", "RR", "i, j", "OUT[()]", "T.max(OUT[()], A[i, j])", "max"),
}


@pytest.mark.parametrize("strange", [False, True])
@pytest.mark.parametrize("m", [0, 1, 63, 200])
@pytest.mark.parametrize("name", SUMS)
def test_sums_over_all_rows(name: str, m: int, strange: bool) -> None:
    axes, over, kinds, variables, out, value, _ = SUMS[name]
    body = f"""
with T.sp_iter({over}, "{kinds}", "f") as [{variables}]:
    with T.init():
        {out} = 0.0
    {out} = {value}
"""
    buffers = {"A": "I J", "X": "N F"} if "X[" in value else {"A": "I J"}
    func = making("f", body, "I\nJ\nN\nF = T.dense_fixed(5)", **buffers, OUT=axes)("float32", "")
    found = partial_sums(func)
    assert found is not None
    assert 'T.sp_iter([I_parts], "S"' in found[0].script()
    rng, n = np.random.default_rng(m), 40
    pattern = csr(rng, m, n, 0.3, "int32", strange)
    args = {"a": pattern[""], "indptr": pattern["_ptr"], "indices": pattern["_idx"],
            "nnz": pattern["_nnz"], "m": m, "n": n,
            "x": rng.integers(-4, 5, (n, 5)).astype("float32"),
            "out": np.full((5,) if axes else (), 7.0, "float32")}  # fmt: skip
    args = {str(p.name): args[str(p.name)] for p in func.params}
    mine, expected = copied(args), copied(args)
    sparsetir.interpret(func, expected)
    sparsetir.build(func)(**mine)
    np.testing.assert_allclose(mine["out"], expected["out"], rtol=1e-4)


def test_sums_that_stay_whole() -> None:
    """Rows that are no reduction, results with too many elements for a copy each, small work."""
    rows = """
with T.sp_iter([I, J], "SR", "f") as [i, j]:
    OUT[i] = OUT[i] + A[i, j]
"""
    wide = """
with T.sp_iter([I, J, K], "RRS", "f") as [i, j, k]:
    OUT[k] = OUT[k] + A[i, j] * X[j, k]
"""
    assert partial_sums(making("f", rows, A="I J", OUT="I")("float32", "")) is None
    assert partial_sums(making("f", wide, A="I J", X="N K", OUT="K")("float32", "")) is None
    for name in ("all of it", "the pattern alone"):
        sch = sparsetir.Schedule(program(name))
        sch.annotate(sch.get_sparse_iteration("f"), "threads", 1)
        assert lookups(sch.func, 2) is None and partial_sums(sch.func) is None
        assert "T.parallel" not in sparsetir.build(sch).stages["II scheduled"].script()


SAMPLED = """
with T.sp_iter([I, J, T.intersect(T.attach(K2, J), K1)], "SRS", "f") as [i, j, k]:
    OUT[i, k] = OUT[i, k] + G[i, j] * A[j, k]
"""


def test_results_at_the_row_itself_are_not_copied() -> None:
    """A product at the elements of the row, which updates what a table would have copied."""
    make = making("f", SAMPLED, AXES, G="I J", A="N K2", OUT="I K1")
    func = make("float32", "int32")
    assert lookups(func, 2) is None
    rng, args = np.random.default_rng(0), {"m": 40, "n": 30, "feat": 50}
    for name, (rows, cols) in {"g": (40, 30), "a": (30, 50), "b": (40, 50)}.items():
        args |= {name + k: v for k, v in csr(rng, rows, cols, 0.3, "int32", False).items()}
    args["out"] = args["b"]
    args = {str(p.name): args[str(p.name)] for p in func.params}
    mine, expected = copied(args), copied(args)
    sparsetir.interpret(func, expected)
    sparsetir.build(func)(**mine)
    np.testing.assert_allclose(mine["out"], expected["out"], rtol=1e-5)
