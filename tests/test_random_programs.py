"""Random programs: what is compiled does what the interpreter does.

A program is drawn as axes (up to three levels, every kind, rows stored or not), an order of
iteration, which axes are reduced, which are fused, sparse or dense output, an operation, and
whether its init is an iteration of its own; its structure and values are drawn too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st

import gpu_runner
import sparsetir
from cuda_runner import requires_cuda_text, run_cuda
from drawing import COMMON, examples
from programs import copied
from sparsetir.schedules.default import default_schedule

KINDS = ("dense_variable", "sparse_variable", "sparse_fixed")


@dataclass
class Drawn:
    """A program's text, its arguments, and the name of its output."""

    text: str
    arguments: dict[str, Any]


@st.composite
def programs(draw: Any) -> Drawn:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    idtype = draw(st.sampled_from(["int32", "int64"]))
    sizes = {name: draw(st.integers(1, most)) for name, most in (("I", 6), ("J", 6), ("K", 5))}
    feat = draw(st.sampled_from([0, 1, 3, 17, 70]))
    stored_rows = draw(st.booleans())
    kinds = {"J": draw(st.sampled_from(KINDS))}
    if draw(st.booleans()):
        kinds["K"] = draw(st.sampled_from(KINDS))
    chain, features, some = ["I", *kinds], ["F"] * bool(feat), [feat] * bool(feat)
    params, lines, args = [], [], {}

    def give(**values: Any) -> None:
        """Parameters: sizes and arrays."""
        for name, value in values.items():
            params.append(f"{name}: T.{idtype if np.ndim(value) == 0 else 'handle'}")
            args[name] = int(value) if np.ndim(value) == 0 else value

    def axis(name: str, kind: str, *words: str) -> None:
        lines.append(f'{name} = T.{kind}({", ".join(words)}, idtype="{idtype}")')

    def buffer(name: str, over: list[str], value: np.ndarray) -> None:
        give(**{name.lower(): value})
        axes = ", ".join(over)
        lines.append(f"{name} = T.match_sparse_buffer({name.lower()}, ({axes},), 'float32')")

    def picked(length: int) -> np.ndarray:
        return np.sort(rng.permutation(length)[: rng.integers(0, length + 1)])

    def values(*shape: int) -> np.ndarray:
        return rng.integers(-4, 5, shape).astype("float32")

    # The stored axes, and how many elements each has.
    give(m=sizes["I"])
    if stored_rows:
        rows = picked(sizes["I"])
        give(rows=len(rows), i_ptr=np.array([0, len(rows)], idtype), i_idx=rows.astype(idtype))
        axis("O", "dense_fixed", "1")
        axis("I", "sparse_variable", "O", "(m, rows)", "(i_ptr, i_idx)")
        axes, count = ["O", "I"], len(rows)
    else:
        axis("I", "dense_fixed", "m")
        axes, count = ["I"], sizes["I"]
    counts = {"I": count}
    for name, kind in kinds.items():
        low, length = name.lower(), sizes[name]
        picks = [picked(length) for _ in range(count)]
        give(**{f"n_{low}": length})
        if kind == "sparse_fixed":
            cols = int(rng.integers(1, length + 1))
            slots = np.full((count, cols), -1)
            for row, pick in zip(slots, picks, strict=True):
                row[: len(pick)] = pick[:cols]
            give(**{f"cols_{low}": cols, f"{low}_idx": slots.reshape(-1).astype(idtype)})
            stored, arrays, count = f"cols_{low}", f"{low}_idx", count * cols
        else:
            offsets = np.cumsum([0, *map(len, picks)])
            stored, arrays, count = f"nnz_{low}", f"{low}_ptr", int(offsets[-1])
            give(**{stored: count, arrays: offsets.astype(idtype)})
            if kind == "sparse_variable":
                give(**{f"{low}_idx": np.concatenate([[], *picks]).astype(idtype)})
                arrays = f"({low}_ptr, {low}_idx)"
        axis(name, kind, axes[-1], f"(n_{low}, {stored})", arrays)
        axes.append(name)
        counts[name] = count
    for name, length in zip(chain, ("m", "n_j", "n_k")):  # dense axes of the same lengths
        axis(f"{name}D", "dense_fixed", length)
    if feat:
        give(feat=feat)
        axis("F", "dense_fixed", "feat")
    wide = draw(st.booleans()) * len(some)
    buffer("A", [*axes, *features[:wide]], values(count, *some[:wide]))
    buffer("B", [f"{chain[-1]}D", *features], values(sizes[chain[-1]], *some))

    # What is iterated: the stored axes, or dense ones where positions must be searched.
    searched = draw(st.booleans())
    order = draw(st.permutations([*([f"{n}D" for n in chain] if searched else axes), *features]))
    if not searched:  # parents before children
        left = iter(axes)
        order = [next(left) if n in axes else n for n in order]
    spatial = {n for n in order if draw(st.booleans())} | ({"O"} & {*order})
    coordinate = {n[0]: n.lower() for n in order} | ({"O": "0"} if searched else {})
    kept = [n for n in chain if {n, f"{n}D"} & spatial]
    if draw(st.booleans()) and kept and kept == chain[: len(kept)]:  # over stored axes
        out_axes = axes[: axes.index(kept[-1]) + 1]
        out_index, out_size = [coordinate[n] for n in out_axes], [counts[kept[-1]]]
    else:
        out_axes, out_size = [f"{n}D" for n in kept], [sizes[n] for n in kept]
        out_index = [coordinate[n] for n in kept]
    if "F" in spatial:
        out_axes, out_index, out_size = [*out_axes, "F"], [*out_index, "f"], [*out_size, feat]
    if not out_axes:
        axis("ONE", "dense_fixed", "1")
        out_axes, out_index, out_size = ["ONE"], ["0"], [1]
    buffer("OUT", out_axes, np.full(out_size, np.nan, "float32"))

    units = list(order)
    if not searched and draw(st.booleans()):  # fuse neighbours that form a chain
        for first, second in zip(axes, axes[1:], strict=False):
            i = units.index(first)
            if units[i + 1 : i + 2] == [second]:
                units[i : i + 2] = [f"T.fuse({first}, {second})"]
                break
    target = f"OUT[{', '.join(out_index)}]"
    a, b = [*axes, *features[:wide]], [chain[-1], *features]
    term = f"A[{', '.join(coordinate[n] for n in a)}] * B[{', '.join(coordinate[n] for n in b)}]"
    if draw(st.booleans()):
        init, update = "0.0", f"{target} + {term}"
    else:
        init, update = 'T.min_value("float32")', f"T.max({target}, {term})"
    kinds_text = "".join("S" if n in spatial else "R" for n in order)
    apart = draw(st.booleans())  # a separate iteration sets the result
    places = [f"x{n}" for n in range(len(out_axes))]
    first = [
        f'with T.sp_iter([{", ".join(out_axes)}], "{"S" * len(places)}", "first") as '
        f"[{', '.join(places)}]:",
        f"    OUT[{', '.join(places)}] = {init}",
    ]
    body = [
        *lines,
        *(first if apart else []),
        f'with T.sp_iter([{", ".join(units)}], "{kinds_text}", "it") as '
        f"[{', '.join(n.lower() for n in order)}]:",
        *([] if apart else ["    with T.init():", f"        {target} = {init}"]),
        f"    {target} = {update}",
    ]
    text = "@T.prim_func\ndef f(" + ", ".join(params) + "):\n    " + "\n    ".join(body)
    return Drawn(text, args)


def _expected(func: Any, arguments: dict[str, Any]) -> np.ndarray:
    mine = copied(arguments)
    sparsetir.interpret(func, mine)
    return mine["out"]


@examples(5, 50, drawn=programs())
def test_cpu_schedule(drawn: Drawn) -> None:
    """Code gives the interpreter's results with the default schedule and with none."""
    func = sparsetir.from_source(drawn.text)
    expected = _expected(func, drawn.arguments)
    mine = copied(drawn.arguments)
    sparsetir.build(func)(**mine)
    np.testing.assert_array_equal(mine["out"], expected)
    mine = copied(drawn.arguments)
    sparsetir.build(sparsetir.lower_sparse_iter(func))(**mine)  # no schedule at all
    np.testing.assert_array_equal(mine["out"], expected)


def check_on_gpu(drawn: Drawn, run: Any = gpu_runner.run_opencl) -> None:
    """The default schedule for GPUs, as OpenCL or CUDA."""
    func = sparsetir.from_source(drawn.text)
    expected = _expected(func, drawn.arguments)
    stage_two = default_schedule(sparsetir.lower_sparse_iter(func), tvm.target.Target("opencl"))
    stage_three = sparsetir.lower_sparse_buffer(stage_two)
    given_names = [str(p.name) for p in func.params]
    values = {
        p.name: drawn.arguments[name]
        for p, name in zip(stage_three.params, given_names, strict=True)
    }
    got = run(stage_three, values)
    out = stage_three.params[given_names.index("out")].name
    # TVM writes float constants into device text with seven digits.
    np.testing.assert_allclose(got[out].reshape(expected.shape), expected, rtol=1e-6)


test_gpu_schedule = gpu_runner.requires_opencl(examples(4, 40, drawn=programs())(check_on_gpu))


@pytest.mark.slow
@requires_cuda_text
@settings(max_examples=20, **COMMON)
@given(programs())
def test_gpu_schedules_as_cuda(drawn: Drawn) -> None:
    check_on_gpu(drawn, run_cuda)
