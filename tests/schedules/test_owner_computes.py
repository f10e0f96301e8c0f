"""Scatters on threads: each owns a part of the result, in the order of one thread."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import sparsetir
from machines import TESTS
from programs import copied
from small import making
from sparsetir.machine import assume
from sparsetir.schedules.passes import owner_computes as passes
from sparsetir.schedules.passes.consecutive_parts import CONSECUTIVE
from sparsetir.sparse_ir.nodes import SparseFunc, sparse_iterations
from sparsetir.sparse_ir.recipes.ranges import range_cuts

CSC = "I0 = T.dense_fixed(m)\nJ = T.dense_fixed(n)\nI = T.sparse_variable(J, (m, nnz), (ptr, idx))"
EDGES = "I0 = T.dense_fixed(m)\nE = T.dense_fixed(nnz)\nK"
CSF = f"{CSC}\nL = T.sparse_variable(I, (l, nnz2), (ptr2, idx2))\nL0 = T.dense_fixed(l)\nK"
# By name: axes, body, and buffers with their axes.
PROGRAMS: dict[str, tuple[str, str, dict[str, str]]] = {
    "columns": (CSC, """
with T.sp_iter([J, I], "RS", "f") as [j, i]:
    with T.init():
        OUT[i] = 0.0
    OUT[i] = OUT[i] + A[j, i] * X[j]
""", {"A": "J I", "X": "J", "OUT": "I0"}),
    "columns, twice": (CSC, """
with T.sp_iter([J, I], "RS", "f") as [j, i]:
    OUT[i] = OUT[i] + A[j, i] * X[j]
with T.sp_iter([J, I], "RS", "g") as [j, i]:
    OUT2[i] = OUT2[i] + X[j]
""", {"A": "J I", "X": "J", "OUT": "I0", "OUT2": "I0"}),
    "columns, maxima": (f"{CSC}\nK", """
with T.sp_iter([J, I, K], "RSS", "f") as [j, i, k]:
    with T.init():
        OUT[i, k] = T.min_value("DTYPE")
    OUT[i, k] = T.max(OUT[i, k], A[j, i] * X[j, k])
""", {"A": "J I", "X": "J K", "OUT": "I0 K"}),
    "an inner sum": (f"{CSC}\nK\nC = T.dense_fixed(5)", """
with T.sp_iter([J, I, C, K], "RSRS", "f") as [j, i, c, k]:
    OUT[i, k] = OUT[i, k] + A[j, i] * X[j, c] * W[j, c, k]
""", {"A": "J I", "X": "J C", "W": "J C K", "OUT": "I0 K"}),
    "a level in the middle": (CSF, """
with T.sp_iter([J, I, L, K], "RSRS", "f") as [j, i, l, k]:
    OUT[i, k] = OUT[i, k] + A[j, i, l] * X[j, k] * W[l, k]
""", {"A": "J I L", "X": "J K", "W": "L0 K", "OUT": "I0 K"}),
    "edges": (EDGES, """
with T.sp_iter([E, K], "SS", "f") as [e, k]:
    OUT[ROW[e], k] = OUT[ROW[e], k] + A[e] * S[()] * X[COL[e], k]
    OUT2[ROW[e], k] = T.min(OUT2[ROW[e], k], A[e])
""", {
        "A": "E", "ROW": "E int32", "COL": "E int32", "S": "", "X": "J K", "OUT": "I0 K",
        "OUT2": "I0 K",
    }),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _at_any_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parts wherever the default schedule may have them."""
    for name in ("CUT_COST", "TEST_COST"):
        monkeypatch.setattr(passes, name, 0)
    with assume(TESTS._replace(threads=3, work_of_threads=1)):
        yield


def program(name: str, dtype: str, idtype: str, ordered: bool) -> SparseFunc:
    axes, body, buffers = PROGRAMS[name]
    if not ordered:
        axes = axes.replace("(ptr, idx))", "(ptr, idx), unique=False)")
    if "J" not in axes:
        axes = f"J = T.dense_fixed(n)\n{axes}"
    return making("f", body.replace("DTYPE", dtype), axes, **buffers)(dtype, idtype)


def arguments(func: SparseFunc, m: int, n: int, nnz: int, ordered: bool) -> dict[str, Any]:
    """Columns with few rows, a dense one and empty ones; in order or not, with NaN and infinity."""
    rng, feat, idtype = np.random.default_rng(m + n), 19, func.axes[0].idtype
    where = rng.random((n, m)) < (nnz / max(1, n * m))
    where[:1], where[-1:] = True, False
    col, row = (x.astype(idtype) for x in np.nonzero(where))
    ptr = np.cumsum([0, *where.sum(1)]).astype(idtype)
    if not ordered:
        for begin, end in zip(ptr[:-1], ptr[1:], strict=True):
            row[begin:end] = rng.permutation(row[begin:end])
    count = len(row)
    fibers = np.arange(0, 2 * count + 1, 2).astype(idtype)
    sizes = {"m": m, "n": n, "nnz": count, "feat": feat, "l": 4, "nnz2": 2 * count}
    args: dict[str, Any] = {
        "ptr": ptr, "idx": row, "ptr2": fibers, "idx2": np.tile([1, 3], count).astype(idtype),
        "row": rng.permutation(row).astype("int32"), "col": col.astype("int32"), **sizes,
    }  # fmt: skip
    lengths = {"I0": m, "J": n, "I": count, "E": count, "K": feat, "C": 5, "L": 2 * count, "L0": 4}
    for buffer in func.buffers:
        name = str(buffer.handle.name)
        if name not in args:
            over = [a.name for a in buffer.axes or ()]
            stored = max((k for k, a in enumerate(over) if a in {"I", "L"}), default=0)
            values = np.asarray(rng.standard_normal([lengths[a] for a in over[stored:]]))
            if values.size and name == "x":
                values.flat[rng.integers(0, values.size, 2)] = [np.nan, -np.inf]
            args[name] = values.astype(buffer.dtype)
    return {str(p.name): args[str(p.name)] for p in func.params}


def on_one_thread(sch: sparsetir.Schedule) -> None:
    for it in sparse_iterations(sch.func):
        sch.annotate(sch.get_sparse_iteration(it.name), "threads", 1)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("shape", [(40, 30, 200), (1, 9, 9), (700, 300, 4000), (3, 0, 0)])
@pytest.mark.parametrize(("dtype", "idtype"), [("float32", "int32"), ("float64", "int64")])
@pytest.mark.parametrize("name", PROGRAMS)
def test_parts_are_the_order_of_one_thread(
    name: str, dtype: str, idtype: str, shape: tuple[int, int, int], ordered: bool
) -> None:
    func = program(name, dtype, idtype, ordered)
    args = arguments(func, *shape, ordered)
    mine, one = copied(args), copied(args)
    kernel = sparsetir.build(func)
    assert CONSECUTIVE in kernel.stages["II scheduled"].script()
    kernel(**mine)
    sparsetir.build(func, schedule=on_one_thread)(**one)
    for out in kernel.signature.func.attrs["outputs"]:
        np.testing.assert_array_equal(mine[str(out)], one[str(out)])


def test_elements_without_an_owner() -> None:
    """All that a visit writes has one owner, and an author may ask for one thread."""
    text = "with T.sp_iter([E], 'S', 'f') as [e]:\n    OUT[ROW[e]] = OUT[ROW[e]] + A[e]"
    buffers = {"A": "E", "ROW": "E int32", "OUT": "I0"}
    make = partial(making, axes=EDGES[: EDGES.rindex("\n")], **buffers)
    func, both = (make("f", t)("float32", "int32") for t in (text, f"{text}\n    A[e] = 0.0"))
    for sch, parts in ((func, True), (both, False)):
        assert (CONSECUTIVE in sparsetir.build(sch).stages["II scheduled"].script()) == parts
    alone = sparsetir.build(func, schedule=on_one_thread)
    assert CONSECUTIVE not in alone.stages["II scheduled"].script()


def test_explained() -> None:
    func = program("columns", "float32", "int32", True)
    shape = sparsetir.explain(func).facts["innermost"]["f1"]
    assert shape.endswith("; each thread updates the elements that it owns")


def test_range_cuts() -> None:
    ptr, idx = np.array([0, 3, 3, 5]), np.array([0, 2, 3, 1, 3])
    np.testing.assert_array_equal(range_cuts(ptr, idx, 4, 2), [[0, 1, 3], [3, 3, 3], [3, 4, 5]])
    np.testing.assert_array_equal(range_cuts(ptr[:2], idx[2::-1], 4, 2), [[0, 3, 3]])
    assert range_cuts(ptr[:1], idx[:0], 0, 2).shape == (0, 3)
