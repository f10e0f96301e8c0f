"""Promises about sizes: kept, broken, refused by the verifier."""

from __future__ import annotations

import numpy as np
import pytest

import sparsetir
from computed_common import blocked, plain_arguments, sizes
from small import text_of
from sparsetir.sparse_ir.errors import IllFormedError
from sparsetir.sparse_ir.promises import check_promises, promised_steps, promises_of
from sparsetir.sparse_ir.verify import verify

CASES = [
    ("exact", 64, [64], [0, 63, 65, 128], "expected 64, as its schedule promises, got"),
    ("max", 64, [0, 63, 64], [65, 2**62], "expected at most 64, as its schedule promises, got"),
    ("min", 64, [64, 2**62], [0, 63], "expected at least 64, as its schedule promises, got"),
    ("multiple", 64, [0, 64, 640], [1, 63, 100],
     "expected a multiple of 64, as its schedule promises, got"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value", "kept", "broken", "message"), CASES)
def test_check(kind, value, kept, broken, message):
    promises = [{"param": "feat", "kind": kind, "value": value}]
    for number in kept:
        check_promises("spmm", promises, {"feat": number})
        check_promises("spmm", promises, {"feat": np.int64(number)})
    for number in broken:
        with pytest.raises(ValueError, match=rf"^spmm: argument 'feat': {message} {number}$"):
            check_promises("spmm", promises, {"feat": number})


def test_the_interpreter_checks_them():
    args = plain_arguments(m=3, n=4, feat=12)
    message = "spmm: argument 'feat': expected a multiple of 8, as its schedule promises, got 12"
    with pytest.raises(ValueError, match=message):
        sparsetir.interpret(blocked(), {**args, **sizes(args)})


def test_they_survive_text():
    promises = [
        {"param": "m", "kind": k, "value": n} for n, k in enumerate(("exact", "max", "min"))
    ]
    func = sparsetir.from_source(blocked(promises=promises).script())
    assert promises_of(func) == promises


@pytest.mark.parametrize(
    ("promise", "message"),
    [
        ({"kind": "max", "value": 3}, "expected a dict of 'param', 'kind' and 'value'"),
        ({"param": "q", "kind": "max", "value": 3}, r"promise about 'q': no such parameter; there"),
        ({"param": "a", "kind": "max", "value": 3}, "'a': expected a parameter of an integer type"),
        ({"param": "m", "kind": "near", "value": 3},
         r"'m': expected a kind among \['exact', 'max', 'min', 'multiple'\], got 'near'"),
        ({"param": "m", "kind": "max", "value": 1.5}, "expected an integer of 0 or more, got 1.5"),
        ({"param": "m", "kind": "max", "value": -1}, "expected an integer of 0 or more, got -1"),
        ({"param": "m", "kind": "multiple", "value": 0}, "expected an integer of 1 or more, got 0"),
    ],
)  # fmt: skip
def test_verify_refuses(promise, message):
    with pytest.raises(IllFormedError, match=message):
        verify(blocked(promises=[promise]))


def test_multiples_show_in_offsets():
    """Of the largest power of two in them, for vectors that must be aligned."""
    promises = [{"param": "feat", "kind": "multiple", "value": n} for n in (4, 24, 3)]
    assert promised_steps(blocked(promises=promises)) == {"feat": 8}
    func = sparsetir.lower_sparse_iter(blocked(promises=promises))
    text = sparsetir.lower_sparse_buffer(func).script()
    assert '(T.Cast("int64", feat) // T.int64(8)) * T.int64(8) + ' in text


BLOCKS = text_of("blocks", """
{attr}
with T.sp_iter([R, P, S, Q], "SSRR", "sums") as [r, p, s, q]:
    with T.init():
        Y[r * 4 + p] = 0.0
    Y[r * 4 + p] = Y[r * 4 + p] + V[r, s, p, q] * X[s * 8 + q]
""", """
R = T.dense_fixed((m + 3) // 4)
S = T.sparse_variable(R, ((n + 7) // 8, nnz), (indptr, indices))
Q = T.dense_fixed(8)
P = T.dense_fixed(4)
ROW = T.dense_fixed(m)
COL = T.dense_fixed(n)
""", V="R S P Q", X="COL", Y="ROW")  # fmt: skip


@pytest.mark.parametrize(
    ("promised", "asked"),
    [({}, (True, True)), ({"n": 8}, (True, False)), ({"m": 8, "n": 16}, (False, False)),
     ({"m": 2, "n": 12}, (True, True))],
)  # fmt: skip
def test_multiples_save_what_blocks_would_ask(promised, asked):
    """Whether a block's last row and column are there follows from sizes that blocks divide."""
    promises = [{"param": p, "kind": "multiple", "value": v} for p, v in promised.items()]
    attr = f'T.func_attr({{"promises": {promises}}})' if promises else "pass"
    func = sparsetir.from_source(BLOCKS.format(attr=attr).replace("    pass\n", ""))
    text = sparsetir.lower_sparse_iter(func).script()
    assert ("< m" in text, "< n" in text) == asked
