"""Compiled functions take of the computed parameters only those that they need."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from gpu_runner import requires_opencl, run_opencl
from sparsetir.runtime.bound_arguments import bound_arguments
from sparsetir.schedules.template import Choices
from sparsetir.schedules.templates.spmv import SlicedRows
from sparsetir.tuning.program import ProgramTask
from spmm_gpu_common import GPU

ORDER = {"recipe": "order_by_column_parts", "indices": "$indices", "n": "$n", "parts": "$parts"}
# OUT[p] = W[p] * X[row of p] * Y[column of p], the non-zeros in order of column parts.
PRODUCTS = """
@T.prim_func
def products(
    w: T.handle, x: T.handle, y: T.handle, out: T.handle, indptr: T.handle,
    indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32, unused: T.int32,
    parts: T.int32, order: T.handle, rows: T.handle, cols: T.handle, count: T.int32,
    packed: T.handle, unread: T.handle,
):
    T.func_attr({"computed": COMPUTED})
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    N = T.dense_fixed(n)
    E = T.dense_fixed(nnz)
    P = T.dense_fixed(count)
    W = T.match_sparse_buffer(w, (I, J), "float32")
    X = T.match_sparse_buffer(x, (I,), "float32")
    Y = T.match_sparse_buffer(y, (N,), "float32")
    OUT = T.match_sparse_buffer(out, (E,), "float32")
    ORDER = T.match_sparse_buffer(order, (E,), "int32")
    ROWS = T.match_sparse_buffer(rows, (P,), "int32")
    COLS = T.match_sparse_buffer(cols, (P,), "int32")
    PACKED = T.match_sparse_buffer(packed, (P,), "float32")
    UNREAD = T.match_sparse_buffer(unread, (E,), "float32")
    with T.sp_iter([P], "S", "products") as [p]:
        OUT[p] = PACKED[p] * X[ROWS[p]] * Y[COLS[p]]
"""
COMPUTED = {
    "parts": {"recipe": "number", "value": 3},
    "order": ORDER,
    "rows": {"recipe": "row_of_position", "indptr": "$indptr", "order": "$order"},
    "cols": {"recipe": "in_order", "values": "$indices", "order": "$order"},
    "count": {"recipe": "last_of", "offsets": "$indptr"},
    "packed": {"recipe": "packed", "values": "$w", "order": "$order"},
    "unread": {"recipe": "packed", "values": "$w", "order": "$order"},
}
GIVEN = ["w", "x", "y", "out", "indptr", "indices", "m", "n", "nnz", "unused"]
TAKEN = [*GIVEN, "rows", "cols", "packed"]
CONFIG = SlicedRows(packed=True)
# Only recipes read them, or they are the length of an array that the kernel takes.
NOT_TAKEN = {
    "long", "window", "i_order", "i_slots", "I_left_count", "I_long_count", "I_vectors_count",
    "I_left_elements_count",
}  # fmt: skip


def program() -> Any:
    return sparsetir.from_source(PRODUCTS.replace("COMPUTED", str(COMPUTED)))


@pytest.fixture(scope="module")
def built() -> Any:
    return sparsetir.build(program())


def arguments(seed: int = 0) -> dict[str, Any]:
    """The program's arguments by name, except the sizes that shapes imply."""
    rng = np.random.default_rng(seed)
    a = sp.random_array((7, 9), density=0.4, format="csr", dtype="float32", rng=rng)
    return {
        "w": a.data, "x": rng.random(7, "float32"), "y": rng.random(9, "float32"),
        "out": np.full(a.nnz, np.nan, "float32"), "indptr": a.indptr.astype("int32"),
        "indices": a.indices.astype("int32"), "unused": 3,
    }  # fmt: skip


def check(args: dict[str, Any]) -> None:
    rows = np.repeat(np.arange(7), np.diff(args["indptr"]))
    order = np.argsort(args["indices"] // 3, kind="stable")
    expected = args["w"] * args["x"][rows] * args["y"][args["indices"]]
    np.testing.assert_allclose(args["out"], expected[order], rtol=1e-6)


def compiled_names(kernel: Any) -> list[str]:
    """Parameters of the compiled function, as TVM lists them."""
    with pytest.raises(TypeError, match="Expected") as error:
        kernel.run_unchecked([])
    text = str(error.value)
    return re.findall(r"[(,] ?(\w+): ", text[text.index("(") :])


def test_what_is_not_needed_is_no_parameter(built: Any) -> None:
    assert built.signature.passed == TAKEN == compiled_names(built)
    assert [str(p.name) for p in built.stages["III"].params] == [
        "W", "X", "Y", "OUT", "J_indptr", "J_indices", "m", "n", "nnz", "unused",
        "ROWS", "COLS", "PACKED",
    ]  # fmt: skip
    assert len(built.stages["II scheduled"].params) == len(GIVEN) + len(COMPUTED)


def test_the_call_is_the_same(built: Any) -> None:
    assert built.signature.names == GIVEN and built.computed == COMPUTED
    for seed in (0, 1, 0):
        args = arguments(seed)
        built(**args)
        check(args)
        args["w"] = args["w"] * 2  # which one of the computed arrays is made of
        built(**args)
        check(args)


def test_recipes_of_others_are_what_they_were(built: Any) -> None:
    args = arguments()
    sizes = {"m": 7, "n": 9, "nnz": len(args["w"])}
    computed = built.compute({**args, **sizes}, {"parts": 9})
    assert list(computed) == list(COMPUTED)
    every = {**args, **sizes, **computed}
    assert list(built.of_values(args, {n: v for n, v in computed.items() if "ed" not in n})) == [
        "packed"
    ]
    built.run_unchecked([every[name] for name in built.signature.passed])
    order = np.argsort(args["indices"], kind="stable")
    np.testing.assert_array_equal(computed["order"], order)
    rows = np.repeat(np.arange(7), np.diff(args["indptr"]))
    expected = args["w"] * args["x"][rows] * args["y"][args["indices"]]
    np.testing.assert_allclose(args["out"], expected[order], rtol=1e-6)


def test_a_plan() -> None:
    a = sp.random_array((300, 200), density=0.05, format="csr", dtype="float32", rng=0)
    b = np.random.default_rng(0).random(200, "float32")
    plan = sparsetir.plan("spmv", a, config=CONFIG)
    signature = plan.kernel.signature
    assert plan.kernel.computed.keys() - set(compiled_names(plan.kernel)) == NOT_TAKEN
    assert signature.passed == compiled_names(plan.kernel)
    np.testing.assert_allclose(plan(b), a @ b, rtol=1e-4)
    np.testing.assert_allclose(plan(b, values=a.data * 2), a @ b * 2, rtol=1e-4)


@requires_opencl
def test_a_kernel_for_gpus(built: Any) -> None:
    args = arguments()
    sizes = {"m": 7, "n": 9, "nnz": len(args["w"])}
    every = {**args, **sizes, **built.compute({**args, **sizes})}
    func = sparsetir.lower(program(), target=GPU)["III"]
    names = dict(zip((str(p.name) for p in func.params), TAKEN, strict=True))
    out = run_opencl(func, {flat: every[name] for flat, name in names.items()})
    check({**args, "out": out["OUT"]})


def test_a_tuned_program() -> None:
    args, func = arguments(), program()
    case = ProgramTask(func, bound_arguments(func, args))
    prepared = case.prepared(Choices())
    prepared.call()
    assert prepared.wrong() is None
    taken = sum(args[name].nbytes for name in ("w", "x", "y", "out", "indptr", "indices"))
    assert prepared.about["bytes"] == taken + 3 * args["w"].nbytes  # rows, columns, packed values
