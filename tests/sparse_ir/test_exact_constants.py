"""Float64 constants reach device text to the last bit."""

from __future__ import annotations

import math
import struct

import pytest

import sparsetir
from sparsetir.sparse_ir import script as T


@pytest.mark.parametrize("value", [1.25e-20, 0.1, math.pi, -1e-300, 1e-310])
def test_constants_that_need_all_digits(value: float) -> None:
    @T.prim_func
    def scale(a: T.handle, b: T.handle, n: T.int32):
        I = T.dense_fixed(n)
        A = T.match_sparse_buffer(a, (I,), "float64")
        B = T.match_sparse_buffer(b, (I,), "float64")
        with T.sp_iter([I], "S", "scale") as [i]:
            B[i] = A[i] * T.FloatImm("float64", value)

    text = sparsetir.build(scale, {"kind": "cuda", "arch": "sm_80"}).source()
    (bits,) = struct.unpack("<q", struct.pack("<d", value))
    exact = any(float(word) == value for word in _numbers(text))
    assert exact or str(bits) in text


def _numbers(text: str) -> list[str]:
    words = text.replace("(", " ").replace(")", " ").replace(";", " ").split()
    out = []
    for word in words:
        try:
            float(word)
        except ValueError:
            continue
        out.append(word)
    return out
