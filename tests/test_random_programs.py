"""Random programs: what is compiled does what the interpreter does.

A program is drawn as axes (up to three levels, every kind, rows stored or not), an order of
iteration, which axes are reduced, which are fused, sparse or dense output, and an operation; its
structure and values are drawn too.
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
    sizes = {
        "I": draw(st.integers(1, 6)),
        "J": draw(st.integers(1, 6)),
        "K": draw(st.integers(1, 5)),
    }
    feat = draw(st.sampled_from([0, 1, 3, 17, 70]))
    stored_rows = draw(st.booleans())
    kinds = {"J": draw(st.sampled_from(KINDS))}
    if draw(st.booleans()):
        kinds["K"] = draw(st.sampled_from(KINDS))
    chain = ["I", *kinds]

    params, lines, args = [], [], {}

    def size(name: str, value: int) -> None:
        params.append(f"{name}: T.{idtype}")
        args[name] = int(value)

    def array(name: str, value: np.ndarray) -> None:
        params.append(f"{name}: T.handle")
        args[name] = value

    size("m", sizes["I"])
    if stored_rows:
        rows = np.sort(rng.permutation(sizes["I"])[: rng.integers(0, sizes["I"] + 1)])
        size("rows", len(rows))
        array("i_ptr", np.array([0, len(rows)], idtype))
        array("i_idx", rows.astype(idtype))
        lines.append(f'O = T.dense_fixed(1, idtype="{idtype}")')
        lines.append(f'I = T.sparse_variable(O, (m, rows), (i_ptr, i_idx), idtype="{idtype}")')
        parents, axes_of = len(rows), {"I": ["O", "I"]}
    else:
        lines.append(f'I = T.dense_fixed(m, idtype="{idtype}")')
        parents, axes_of = sizes["I"], {"I": ["I"]}
    above = "I"
    for name, kind in kinds.items():
        low = name.lower()
        length = sizes[name]
        picks = [
            np.sort(rng.permutation(length)[: rng.integers(0, length + 1)]) for _ in range(parents)
        ]
        counts = np.array([len(p) for p in picks], np.int64)
        size(f"n_{low}", length)
        if kind == "sparse_fixed":
            cols = int(rng.integers(1, length + 1))
            slots = np.full((parents, cols), -1)
            for r, p in enumerate(picks):
                slots[r, : min(cols, len(p))] = p[:cols]
            size(f"cols_{low}", cols)
            array(f"{low}_idx", slots.reshape(-1).astype(idtype))
            shape = f"(n_{low}, cols_{low})"
            lines.append(f'{name} = T.{kind}({above}, {shape}, {low}_idx, idtype="{idtype}")')
            parents *= cols
        else:
            size(f"nnz_{low}", counts.sum())
            array(f"{low}_ptr", np.concatenate([[0], np.cumsum(counts)]).astype(idtype))
            shape = f"(n_{low}, nnz_{low})"
            if kind == "dense_variable":
                lines.append(f'{name} = T.{kind}({above}, {shape}, {low}_ptr, idtype="{idtype}")')
            else:
                flat = np.concatenate(picks) if picks else np.zeros(0)
                array(f"{low}_idx", flat.astype(idtype))
                arrays_of = f"({low}_ptr, {low}_idx)"
                lines.append(f'{name} = T.{kind}({above}, {shape}, {arrays_of}, idtype="{idtype}")')
            parents = int(counts.sum())
        axes_of[name] = [*axes_of[above], name]
        above = name
    leaf = chain[-1]
    length_of = {"I": "m", "J": "n_j", "K": "n_k"}
    for name in chain:  # dense axes of the same lengths
        lines.append(f'{name}D = T.dense_fixed({length_of[name]}, idtype="{idtype}")')
    if feat:
        size("feat", feat)
        lines.append(f'F = T.dense_fixed(feat, idtype="{idtype}")')

    def values(*shape: int) -> np.ndarray:
        return rng.integers(-4, 5, shape).astype("float32")

    feat_shape = (feat,) if feat else ()
    wide = draw(st.booleans()) and feat
    a_axes = [*axes_of[leaf], *(["F"] if wide else [])]
    array("a", values(parents, *(feat_shape if wide else ())))
    lines.append(f"A = T.match_sparse_buffer(a, ({', '.join(a_axes)},), 'float32')")
    b_axes = [f"{leaf}D", *(["F"] if feat else [])]
    array("b", values(sizes[leaf], *feat_shape))
    lines.append(f"B = T.match_sparse_buffer(b, ({', '.join(b_axes)},), 'float32')")

    # What is iterated: the stored axes, or dense ones where positions must be searched.
    searched = draw(st.booleans())
    loops = [f"{n}D" for n in chain] if searched else list(axes_of[leaf])
    order = draw(st.permutations(loops + (["F"] if feat else [])))
    rank = {n: i for i, n in enumerate(axes_of[leaf])}
    if not searched:  # parents before children
        places = sorted(i for i, n in enumerate(order) if n in rank)
        for place, name in zip(places, sorted(rank, key=rank.__getitem__), strict=True):
            order[place] = name
    spatial = {n for n in order if draw(st.booleans())}
    if "O" in order:
        spatial.add("O")
    coord = {n: n.lower() for n in order}
    base = {n: (n[:-1] if searched and n != "F" else n) for n in order}
    of_base = {base[n]: coord[n] for n in order}
    kept = [n for n in chain if any(base[o] == n and o in spatial for o in order)]
    sparse_out = draw(st.booleans()) and bool(kept) and kept == chain[: len(kept)]
    out_axes = list(axes_of[kept[-1]]) if sparse_out else [f"{n}D" for n in kept]
    out_index = (
        [("0" if n == "O" and searched else of_base[n]) for n in axes_of[kept[-1]]]
        if (sparse_out)
        else [of_base[n] for n in kept]
    )
    out_size = [sizes[n] for n in kept]
    if sparse_out:
        out_size = [int(np.prod([1]))]
        counts_of = {"I": args.get("rows", sizes["I"])}
        for name in kept[1:]:
            low = name.lower()
            cols = args.get(f"cols_{low}")
            prev = counts_of[chain[chain.index(name) - 1]]
            counts_of[name] = prev * cols if cols else args[f"nnz_{low}"]
        out_size = [counts_of[kept[-1]]]
    if "F" in spatial and "F" in order:
        out_axes.append("F")
        out_index.append("f")
        out_size.append(feat)
    if not out_axes:
        lines.append(f'ONE = T.dense_fixed(1, idtype="{idtype}")')
        out_axes, out_index, out_size = ["ONE"], ["0"], [1]
    array("out", np.full(out_size, np.nan, "float32"))
    lines.append(f"OUT = T.match_sparse_buffer(out, ({', '.join(out_axes)},), 'float32')")

    kinds_text = "".join("S" if n in spatial else "R" for n in order)
    units = list(order)
    if not searched and draw(st.booleans()):  # fuse neighbours that form a chain
        for first, second in zip(axes_of[leaf], axes_of[leaf][1:], strict=False):
            i = units.index(first) if first in units else -1
            if 0 <= i < len(units) - 1 and units[i + 1] == second:
                units[i : i + 2] = [f"T.fuse({first}, {second})"]
                break
    a_index = [("0" if n == "O" and searched else of_base[n]) for n in a_axes]
    b_index = [of_base[leaf], *(["f"] if feat else [])]
    target = f"OUT[{', '.join(out_index)}]"
    term = f"A[{', '.join(a_index)}] * B[{', '.join(b_index)}]"
    if draw(st.booleans()):
        init, update = "0.0", f"{target} + {term}"
    else:
        init, update = 'T.min_value("float32")', f"T.max({target}, {term})"
    body = [
        *lines,
        f'with T.sp_iter([{", ".join(units)}], "{kinds_text}", "it") as '
        f"[{', '.join(coord[n] for n in order)}]:",
        "    with T.init():",
        f"        {target} = {init}",
        f"    {target} = {update}",
    ]
    text = "@T.prim_func\ndef f(" + ", ".join(params) + "):\n    " + "\n    ".join(body)
    return Drawn(text, args)


def _expected(func: Any, arguments: dict[str, Any]) -> np.ndarray:
    mine = copied(arguments)
    sparsetir.interpret(func, mine)
    return mine["out"]


@examples(10, 50, drawn=programs())
def test_cpu_schedule(drawn: Drawn) -> None:
    """With the default schedule and with none, code gives what the interpreter gives."""
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


test_gpu_schedule = gpu_runner.requires_opencl(examples(8, 40, drawn=programs())(check_on_gpu))


@pytest.mark.slow
@requires_cuda_text
@settings(max_examples=20, **COMMON)
@given(programs())
def test_gpu_schedules_as_cuda(drawn: Drawn) -> None:
    check_on_gpu(drawn, run_cuda)
