"""Coordinates are integers: no guard sees another number than the access, whatever the types."""

from __future__ import annotations

import math
import re
import struct
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import strategies as st

import gpu_runner
import sparsetir
from cuda_runner import requires_cuda_text, run_cuda
from drawing import examples
from programs import PROGRAMS, copied
from sparsetir.schedules.default import default_schedule
from sparsetir.sparse_ir import script as T

FAR = [2**30, 1431655766, -(2**31)]  # whose triples are elsewhere in int32
LENGTH = 13


def program(body: str, index: str = "int32", other: str = "int32", idtype: str = "int32") -> Any:
    """Vectors C and W, a compressed one S, and rows R each of which has its length."""
    lines = "".join(f"        {line}\n" for line in body.splitlines())
    return sparsetir.from_source(f"""@T.prim_func
def f(
    c: T.handle, w: T.handle, x: T.handle, y: T.handle, idx: T.handle, other: T.handle,
    s: T.handle, s_ptr: T.handle, s_idx: T.handle, r: T.handle, r_ptr: T.handle,
    m: T.{idtype}, n: T.{idtype}, nnz: T.{idtype}, rnz: T.{idtype}, stride: T.int32,
):
    I = T.dense_fixed(m, idtype="{idtype}")
    N = T.dense_fixed(n, idtype="{idtype}")
    O = T.dense_fixed(1, idtype="{idtype}")
    NS = T.sparse_variable(O, (n, nnz), (s_ptr, s_idx), idtype="{idtype}")
    P = T.dense_fixed(4, idtype="{idtype}")
    PR = T.dense_variable(P, (9, rnz), r_ptr, idtype="{idtype}")
    C = T.match_sparse_buffer(c, (N,), "float32")
    W = T.match_sparse_buffer(w, (N,), "float32")
    X = T.match_sparse_buffer(x, (I,), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    S = T.match_sparse_buffer(s, (O, NS), "float32")
    R = T.match_sparse_buffer(r, (P, PR), "float32")
    IDX = T.match_sparse_buffer(idx, (I,), "{index}")
    J = T.match_sparse_buffer(other, (I,), "{other}")
    with T.sp_iter([I], "S", "f") as [i]:
{lines}""")


def arguments(
    index: Any, other: Any = None, idtype: str = "int32", stride: int = 3
) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    m, n = len(index), LENGTH
    return {
        "c": np.zeros(n, "float32"), "w": rng.random(n, "float32") + 1,
        "x": rng.random(m, "float32") + 1, "y": np.full(m, np.nan, "float32"),
        "idx": index, "other": np.zeros(m, "int32") if other is None else other,
        "s": rng.random(6, "float32") + 1, "s_ptr": np.array([0, 6], idtype),
        "s_idx": np.sort(rng.permutation(n)[:6]).astype(idtype),
        "r": rng.random(9, "float32") + 1, "r_ptr": np.array([0, 2, 2, 8, 9], idtype),
        "m": m, "n": n, "nnz": 6, "rnz": 9, "stride": stride,
    }  # fmt: skip


def check(func: Any, args: dict[str, Any]) -> dict[str, Any]:
    """The kernel gives what the interpreter gives, which is given back."""
    want, result = copied(args), copied(args)
    sparsetir.interpret(func, want)
    sparsetir.build(func)(**result)
    for name in ("c", "y"):
        np.testing.assert_array_equal(result[name], want[name])
    return want


BODIES = {
    "write": "C[IDX[i] * 3 - 1] = X[i]",
    "read": "Y[i] = W[IDX[i] * 3 - 1]",
    "search": "Y[i] = S[0, IDX[i] * 3 - 1]",
    "ragged": "Y[i] = R[2, IDX[i] * 3 - 1]",
    "bound": "t: T.let[T.int32] = IDX[i] * 3\nC[t - 1] = X[i]",
    "symbol": "C[IDX[i] * stride - 1] = X[i]",
    "bits": "C[(IDX[i] << 1) + IDX[i] - 1] = X[i]",
    "chosen": "C[T.if_then_else(i >= 0, IDX[i] * 3, i) - 1] = X[i]",
}


@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.default(4)
def test_what_leaves_int32_is_absent(body: str, far: int) -> None:
    index = np.array([1, far, 2, 3], "int32")
    want = check(program(body), arguments(index))
    if "C[" in body:
        x = arguments(index)["x"]
        assert np.flatnonzero(want["c"]).tolist() == [2, 5, 8]
        np.testing.assert_array_equal(want["c"][[2, 5, 8]], x[[0, 2, 3]])
    else:
        assert want["y"][1] == 0


@pytest.mark.parametrize(
    "index", ["T.cast(IDX[i], 'int32')", "IDX[i]", "T.cast(IDX[i], 'int32') * 2"]
)
@pytest.mark.parametrize("buffer", ["S[0, {}]", "W[{}]", "R[2, {}]"])
def test_casts_keep_the_number(index: str, buffer: str) -> None:
    """2^32 + 3 does not become 3, neither by a cast nor in a search of int32."""
    far = np.array([*(2**32 + np.arange(LENGTH)), 1, 3], "int64")
    want = check(program(f"Y[i] = {buffer.format(index)}", "int64"), arguments(far))
    assert (want["y"][:LENGTH] == 0).all()


def test_the_access_is_of_the_number_that_the_guard_sees() -> None:
    """TVM's simplifier took clamps off in accesses, of numbers that it took not to be so large."""
    body = "Y[i] = W[T.if_then_else(IDX[i] > 0, J[i] * IDX[i], IDX[i] + i) + J[i] * 5]"
    rng = np.random.default_rng(0)
    ends = [2**62, 2**62 - 1, 2**63 - 1, -(2**63), 2**61, -(2**62), -1, 0, 1, 2, 2**32 + 1]
    index, other = (rng.choice(ends, 300) for _ in range(2))
    check(program(body, "int64", "int64", "int64"), arguments(index, other, "int64"))


def test_what_fits_stays_as_it_is() -> None:
    """Bounds by the types of loads, the lengths of axes, or a proof of the coordinate."""
    for body in ("Y[i] = W[i]", "Y[i] = W[IDX[i]]", "Y[i] = W[T.max(IDX[i] // 2, 1)]"):
        assert "int64" not in sparsetir.lower_sparse_iter(program(body)).script()
    func = program("Y[i] = W[T.cast(IDX[i], 'int32') * 3]", "int8")
    assert "int64" not in sparsetir.lower_sparse_iter(func).script()
    func = PROGRAMS["spmm_bsr"].make("float32", "int32")  # B[j * block + b, k] for j < nb
    assert "int64" not in sparsetir.lower_sparse_iter(func).script()


@pytest.mark.parametrize("body", ["Y[i] = W[IDX[i]]", BODIES["read"], BODIES["symbol"]])
def test_offsets_of_64_bits_are_not_narrowed(body: str) -> None:
    """Addresses would widen them again."""
    stage3 = sparsetir.lower_sparse_buffer(sparsetir.lower_sparse_iter(program(body, "int64")))
    assert 'T.Cast("int32"' not in stage3.script()


def indices(leaves: list[str]) -> st.SearchStrategy[str]:
    numbers = st.sampled_from([1, 2, 3, -1, -2, 7, 1000, 2**20])
    steps = st.sampled_from([2, 3, 7])

    def more(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.one_of(
            st.builds("({} * {})".format, inner, numbers),
            st.builds("({} {} {})".format, inner, st.sampled_from("+-"), numbers),
            st.builds("({} {} {})".format, inner, st.sampled_from("+-*&|^"), inner),
            st.builds("({} {} {})".format, inner, st.sampled_from(["//", "%"]), steps),
            st.builds("T.{}({}, {})".format, st.sampled_from(["min", "max"]), inner, inner),
            st.builds("T.cast({}, '{}')".format, inner, st.sampled_from(["int32", "int64"])),
        )

    return st.recursive(st.sampled_from(leaves), more, max_leaves=4)


@examples(
    12, 200,
    index=indices(["IDX[i]", "IDX[i]", "J[i]", "i", "stride"]),
    buffer=st.sampled_from(["C", "W[{}]", "S[0, {}]", "R[2, {}]"]),
    types=st.tuples(*[st.sampled_from(["int32", "int64"])] * 3),
    stride=st.sampled_from([1, 3, -3, 2**31 - 1, -(2**31)]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_random_indices(
    index: str, buffer: str, types: tuple[str, str, str], stride: int, seed: int
) -> None:
    first, second, idtype = types
    rng = np.random.default_rng(seed)

    def drawn(dtype: str) -> np.ndarray:
        ends = np.iinfo(dtype)
        far = [f for f in (*FAR, ends.max, ends.max - 1, ends.max // 3 + 1, 2**32 + 3, 2**62)
               if f <= ends.max]  # fmt: skip
        near = rng.integers(-3, LENGTH + 3, 12)
        return np.array([*near, *far, ends.min, ends.min + 1, -1, 0, 1], dtype)[:20]

    body = f"C[{index}] = X[i]" if buffer == "C" else f"Y[i] = {buffer.format(index)}"
    args = arguments(drawn(first), rng.permutation(drawn(second)), idtype, stride)
    check(program(body, first, second, idtype), {**args, "m": len(args["idx"])})


def run_on_gpu(func: Any, args: dict[str, Any], run: Any) -> None:
    want = copied(args)
    sparsetir.interpret(func, want)
    stage_two = default_schedule(sparsetir.lower_sparse_iter(func), tvm.target.Target("opencl"))
    stage_three = sparsetir.lower_sparse_buffer(stage_two)
    given_names = [str(p.name) for p in func.params]
    flat = {n: p.name for n, p in zip(given_names, stage_three.params, strict=True)}
    result = run(stage_three, {flat[n]: args[n] for n in given_names})
    for name in ("c", "y"):
        np.testing.assert_array_equal(result[flat[name]].reshape(want[name].shape), want[name])


GPU_BODIES = [
    *((BODIES[name], "int32") for name in ("write", "read", "search", "symbol")),
    ("C[IDX[i] * 3 - 1] = X[i]", "int64"),
    ("C[IDX[i] * J[i] - 1] = X[i]", "int64"),
    ("Y[i] = S[0, IDX[i]]", "int64"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "dtype"), GPU_BODIES)
@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run_cuda, marks=requires_cuda_text, id="cuda"),
        pytest.param(gpu_runner.run_opencl, marks=gpu_runner.requires_opencl, id="opencl"),
    ],
)
@pytest.mark.default(3)
def test_on_gpus(body: str, dtype: str, run: Any) -> None:
    far = FAR if dtype == "int32" else [2**62, 2**63 - 1, -(2**63), 2**32 + 3, 6148914691236517206]
    index = np.array([1, *far, 2], dtype)
    run_on_gpu(program(body, dtype), arguments(index, np.full(len(index), 3, "int32")), run)


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
    exact = any(float(x) == value for x in re.findall(r"-?\d+\.?\d*(?:e[+-]?\d+)?", text))
    assert exact or str(bits) in text
