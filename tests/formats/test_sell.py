"""SELL-C-sigma: its layout against plain Python, products, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conversions import patterns
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import MATRICES

import sparsetir
from programs import PROGRAMS
from sparsetir.formats import ELL, SELL, Operand, Pattern
from sparsetir.formats.infer_indices import infer_format
from sparsetir.sparse_ir.errors import StructureError

SIZES = [(1, 1), (2, 1), (4, 4), (3, 6), (4, 1000)]


def slow_sell(pattern: Pattern, data: np.ndarray, c: int, sigma: int) -> tuple[Any, ...]:
    """step_ptr, and row, column and value of each lane of each step, row by row."""
    rows = [[] for _ in range(pattern.shape[0])]
    for i, j, v in zip(*pattern.coords, data, strict=True):
        rows[i].append((int(j), v))
    order: list[int] = []
    for top in range(0, len(rows), sigma):
        order += sorted(range(top, min(top + sigma, len(rows))), key=lambda i: -len(rows[i]))
    step_ptr, of_lane, columns, values = [0], [], [], []
    for first in range(0, len(order), c):
        lanes = order[first : first + c]
        steps = max(len(rows[i]) for i in lanes)
        for t in range(steps):
            for lane in range(c):
                row = lanes[lane] if lane < len(lanes) else -1
                stored = row >= 0 and t < len(rows[row])
                of_lane.append(row)
                columns.append(rows[row][t][0] if stored else -1)
                values.append(rows[row][t][1] if stored else 0)
        step_ptr.append(step_ptr[-1] + steps)
    return step_ptr, of_lane, columns, values


def check_layout(pattern: Pattern, c: int, sigma: int) -> None:
    fmt = SELL(c, sigma)
    conv, data = fmt.convert(pattern), np.arange(1, pattern.nnz + 1, dtype="float32")
    args = conv.arguments(A=data)
    step_ptr, rows, columns, stored = slow_sell(pattern, data, c, sigma)
    np.testing.assert_array_equal(args[f"indptr_jw_{fmt.name}"], step_ptr)
    np.testing.assert_array_equal(args[f"indices_ir_{fmt.name}"], rows)
    np.testing.assert_array_equal(args[f"indices_jc_{fmt.name}"], columns)
    np.testing.assert_array_equal(args[f"a_{fmt.name}"], stored)
    assert args[f"n_s_{fmt.name}"] == len(step_ptr) - 1 == -(-pattern.shape[0] // c)
    assert args[f"n_jw_{fmt.name}"] == max(np.diff(step_ptr), default=0)
    assert conv.places == len(columns) == fmt.places(pattern)


@pytest.mark.parametrize(("c", "sigma"), SIZES)
def test_layout(c: int, sigma: int) -> None:
    for pattern in MATRICES.values():
        check_layout(pattern, c, sigma)


@given(pattern=patterns(), c=st.integers(1, 5), windows=st.integers(0, 5))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_layout_of_random_matrices(pattern: Pattern, c: int, windows: int) -> None:
    check_layout(pattern, c, windows * c or 1)


def test_a_vector_of_sums_for_each_slice() -> None:
    """What a kernel may do: step by step, all lanes at a time, rows from the first step."""
    pattern = MATRICES["one dense row"]
    data = np.random.default_rng(0).standard_normal(pattern.nnz)
    x = np.random.default_rng(1).standard_normal(pattern.shape[1])
    conv = SELL(4, 8).convert(pattern, Operand({"A": "float64"}))
    args = {n.removesuffix("_sell_4_8"): v for n, v in conv.arguments(A=data).items()}
    step_ptr = args["indptr_jw"]
    rows, columns, a = (args[n].reshape(-1, 4) for n in ("indices_ir", "indices_jc", "a"))
    y = np.zeros(pattern.shape[0])
    for first, last in zip(step_ptr[:-1], step_ptr[1:], strict=True):
        if first < last:
            lanes = rows[first] >= 0
            y[rows[first][lanes]] = (a[first:last] * x[columns[first:last]]).sum(axis=0)[lanes]
    want = np.zeros_like(y)
    np.add.at(want, pattern.coords[0], data * x[pattern.coords[1]])
    np.testing.assert_allclose(y, want)


def test_sorting_saves_padding() -> None:
    """Longest and shortest rows in turns: with sigma they meet their like."""
    lengths = np.tile([8, 1], 16)
    rows = np.repeat(np.arange(32), lengths)
    cols = np.concatenate([np.arange(n) for n in lengths])
    pattern = Pattern([rows, cols], (32, 8))
    assert SELL(4).convert(pattern).places == ELL().convert(pattern).places == 32 * 8
    assert SELL(4, 4).convert(pattern).places == 32 * 8
    assert SELL(4, 8).convert(pattern).padding == 0
    assert SELL(4, 2**31 - 4).convert(pattern).padding == 0


def test_decomposed_program() -> None:
    func = PROGRAMS["spmv"].make("float32", "int32")
    new = SELL(4, 8).convert(MATRICES["random"], Operand.of(func, "A")).decompose(func)
    text = new.script()
    for line in (
        "JW_sell_4_8 = T.dense_variable(S_sell_4_8, (n_jw_sell_4_8, nnz_jw_sell_4_8), "
        'indptr_jw_sell_4_8, idtype="int32")',
        'IR_sell_4_8 = T.sparse_fixed(JW_sell_4_8, (m, 4), indices_ir_sell_4_8, idtype="int32", '
        "unique=False)",
        'JC_sell_4_8 = T.sparse_fixed(IR_sell_4_8, (n, 1), indices_jc_sell_4_8, idtype="int32")',
        'with T.sp_iter([S_sell_4_8, JW_sell_4_8, IR_sell_4_8, JC_sell_4_8], "SRSR", '
        '"spmv_sell_4_8") as [s, jw, ir, jc]:',
        "[ir] + A_sell_4_8[s, jw, ir, jc] * ",
    ):
        assert line in text
    assert "MASK" not in text
    assert sparsetir.from_source(text).script() == text


@pytest.mark.parametrize("build", [False, True])
def test_sddmm(build: bool) -> None:
    """OUT is made in the format and comes back from it."""
    func = PROGRAMS["sddmm"].make("float32", "int32")
    for name in ["random"] if build else ["random", "empty rows", "nothing stored"]:
        pattern = MATRICES[name]
        (m, n), rng = pattern.shape, np.random.default_rng(5)
        args = {
            "a": rng.standard_normal(pattern.nnz).astype("float32"),
            "x": rng.standard_normal((m, 3)).astype("float32"),
            "y": rng.standard_normal((n, 3)).astype("float32"),
            "out": np.zeros(pattern.nnz, "float32"),
            "indptr": pattern.indptr.astype("int32"),
            "indices": pattern.coords[1].astype("int32"),
            "m": m, "n": n, "nnz": pattern.nnz, "feat": 3,
        }  # fmt: skip
        conv = SELL(2, 4).convert(pattern, Operand.of(func, "A", "OUT"))
        args |= conv.arguments(A=args["a"], OUT=None)
        want = PROGRAMS["sddmm"].oracle(args)["out"]
        if build:
            kernel = sparsetir.build(conv.decompose(func))
            kernel(**{n: args[n] for n in kernel.signature.names})
        else:
            sparsetir.interpret(conv.decompose(func), args)
        np.testing.assert_allclose(args["out"], want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(conv.restore("OUT", args), want, rtol=1e-5, atol=1e-6)


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SELL(0), "SELL: argument 'c': expected a positive integer, got 0"),
        (lambda: SELL(4, 2.0), "SELL: argument 'sigma': expected a positive integer, got 2.0"),
        (lambda: SELL(4, 6), "SELL: argument 'sigma': expected 1 or a multiple of c = 4, got 6"),
    ],
)
def test_parameters_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match="^" + message + "$"):
        make()


def test_inference_from_the_rule_alone_is_refused() -> None:
    """Which rows make a slice is not in the rule; one step is all that there is room for."""
    pattern = MATRICES["random"]
    (rule,) = SELL(4).rules(Operand())
    with pytest.raises(StructureError, match="axis 'IR' has 4 slots in each row, none for coord"):
        infer_format(rule, pattern.coords, pattern.shape)


def test_too_many_slots_refused() -> None:
    """Nothing that large is made."""
    pattern = Pattern([np.zeros(1, np.int32), np.zeros(1, np.int32)], (1, 1))
    assert SELL(4).convert(pattern).places == 4
    pattern = Pattern([np.zeros(3, np.int32), np.arange(3)], (1, 3))
    with pytest.raises(StructureError, match=f"places = {3 * 2**30} does not fit int32"):
        SELL(2**30).convert(pattern)
