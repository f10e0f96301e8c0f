"""Random programs that look like what the compiler makes: its names, its predicates, its bounds.

Axes, buffers, iterations and coordinates have names that primitives and lowerings would give;
predicates are marked as likely, and indices are bounded, as split does; and programs read what they
write. What they mean is what the interpreter says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Adverse", "adverse"]

# What split, positions, divide, peel, precompute and inits would call theirs, beside an axis K.
AXES = (
    "I", "J", "K", "K0", "K1", "K00", "K0_1", "I0", "I1", "J0", "I_all", "J_all", "K_all", "K_rest",
    "K_whole", "I_parts", "J_part", "J_tiles0", "I_J", "I_J0", "K_lanes", "I_panels", "O",
)  # fmt: skip
BUFFERS = (
    "A", "B", "C", "A_ws", "B_ws", "C_ws", "C_ws_sum", "C_run", "I_at", "J_at", "J_pos", "J_pos_1",
    "J_indptr", "J_indices", "A_packed", "B_tiles", "C_shared", "A_each", "C_rest", "lanes",
)  # fmt: skip
ITERATIONS = (
    "f", "f0", "f1", "f10", "f_init", "f_start", "f_reduce", "f_write", "f_sums", "f_rest", "f_add",
    "f_search", "f_step", "f_keep", "root",
)  # fmt: skip
COORDINATES = (
    "i", "j", "k", "k0", "k1", "k00", "k0_1", "i0", "i1", "j0", "vk0", "vi", "v", "ij", "k_parts",
    "i_row", "m_1",
)  # fmt: skip
HEAD = """
@T.prim_func
def adverse(a: T.handle, b: T.handle, c: T.handle, d: T.handle, x: T.handle, p: T.handle,
            q: T.handle, m: T.int32, n: T.int32, l: T.int32, nnz: T.int32):
    {I} = T.dense_fixed(m)
    {J} = T.sparse_variable({I}, (n, nnz), (p, q))
    {N} = T.dense_fixed(n)
    {K} = T.dense_fixed(l)
    {A} = T.match_sparse_buffer(a, ({I}, {J}), "float32")
    {B} = T.match_sparse_buffer(b, ({N}, {K}), "float32")
    {C} = T.match_sparse_buffer(c, ({I}, {K}), "float32")
    {D} = T.match_sparse_buffer(d, ({I}, {K}), "float32")
    {X} = T.match_sparse_buffer(x, ({I},), "int32")
    {W} = T.alloc_sparse_buffer((), "float32", "local")
"""
SPMM = """    with T.sp_iter([{I}, {J}, {K}], "SRS", "{f}") as [{i}, {j}, {k}]:
        with T.init():
            {C}[{i}, {k}] = {value}
{when}        {C}[{i}, {k}] = {C}[{i}, {k}] + {A}[{i}, {j}] * {B}[{j}, {at}]
"""
DENSE = """    with T.sp_iter([{I}, {N}, {K}], "SRS", "{f}") as [{i}, {j}, {k}]:
        with T.init():
            {C}[{i}, {k}] = {value}
{when}        {C}[{i}, {k}] = {C}[{i}, {k}] + {B}[{j}, {k}] * {D}[{i}, {at}]
"""
LARGEST = """    with T.sp_iter([{I}, {J}, {K}], "SRS", "{f}") as [{i}, {j}, {k}]:
        with T.init():
            {C}[{i}, {k}] = -3.0
{when}        {C}[{i}, {k}] = T.max({C}[{i}, {k}], {A}[{i}, {j}] * {B}[{j}, {at}])
"""
EACH = """    with T.sp_iter([{I}, {K}], "SS", "{f}") as [{i}, {k}]:
{when}        {C}[{i}, {k}] = {D}[{i}, {at}] * 2.0
"""
AGAIN = """    with T.sp_iter([{I}, {K}], "SS", "{g}") as [{i}, {k}]:
{when}        {C}[{i}, {k}] = {C}[{i}, {k}] * 0.5 + {D}[{i}, {at}]
"""
ORDERED = """    with T.sp_iter([{I}, {K}], "SS", "{g}") as [{i}, {k}]:
        T.sp_iter_attr({{"ordered": 1}})
{when}        {C}[{i}, {k}] = {C}[{i}, {k} - 1] * 0.5 + {D}[{i}, {at}]
"""
SCAN = """    {W}[()] = 0.0
    with T.sp_iter([{I}, {K}], "SS", "{g}") as [{i}, {k}]:
        T.sp_iter_attr({{"ordered": 1}})
        {W}[()] = {W}[()] * 0.5 + {D}[{i}, {at}]
{when}        {C}[{i}, {k}] = {W}[()]
"""
ROWS = """    with T.sp_iter([{I}, {K}], "SS", "{f}") as [{i}, {k}]:
        {W}[()] = {value}
        with T.sp_iter([{J}], "R", "{g}") as [{j}]:
{inner}            {W}[()] = {W}[()] + {A}[{i}, {j}] * {B}[{j}, {at}]
{when}        {C}[{i}, {k}] = {W}[()]
"""
SCATTERED = """    with T.sp_iter([{I}, {K}], "SS", "{g}") as [{i}, {k}]:
{when}        {C}[{X}[{i}], {k}] = {C}[{X}[{i}], {k}] + {D}[{i}, {at}]
"""
COLUMNS = """    with T.sp_iter([{I}, {J}, {K}], "RSS", "{f}") as [{i}, {j}, {k}]:
        with T.init():
            {B}[{j}, {k}] = {value}
{when}        {B}[{j}, {k}] = {B}[{j}, {k}] + {A}[{i}, {j}] * {D}[{i}, {at}]
"""
BODIES = (
    SPMM, SPMM, SPMM, DENSE, LARGEST, EACH, EACH, COLUMNS, ROWS, SPMM + AGAIN, EACH + AGAIN,
    DENSE + ORDERED, EACH + ORDERED, ORDERED, SCAN, SPMM + SCATTERED, EACH + SCATTERED,
)  # fmt: skip
PREDICATES = (
    "{i} >= {k}", "{k} <= {i}", "{k} < 5", "{k} < l - 1", "{i} * 2 - {k} >= 1", "{k} * 4 + {i} < l",
    "T.min({k} * 4, l - 4) + {i} >= {k} * 4", "{k} + {i} <= l - 1", "{D}[{i}, {k}] > 0.3",
    "{k} < 3 or {i} > 2", "{i} < m", "{k} % 3 != 1", "{k} >= {k} // 4 * 4",
)  # fmt: skip
INDICES = (
    "{k}", "{k}", "{k}", "T.min({k}, 4)", "T.min({k}, l - 1)", "T.min({k} * 2, l - 2)",
    "T.max({k} - 1, 0)", "{k} + 1", "{k} - 1", "T.min({i}, l - 4)", "T.min({k} * 4, l - 4) + 1",
    "l - 1 - {k}", "{k} // 2",
)  # fmt: skip


@dataclass(frozen=True)
class Adverse:
    """A program's text, its arguments, and the names of those that it writes."""

    text: str
    arguments: dict[str, Any]
    outputs: tuple[str, ...] = ("b", "c")


def adverse(rng: np.random.Generator) -> Adverse:
    """A random program."""

    def pick(options: Any) -> str:
        return str(options[rng.integers(len(options))])

    names: dict[str, str] = {}
    taken: set[str] = {"a", "b", "c", "d", "x", "p", "q", "m", "n", "l", "nnz", "T"}

    def draw(keys: str | tuple[str, ...], pool: tuple[str, ...]) -> None:
        for key in keys:
            names[key] = pick([name for name in pool if name not in taken])
            taken.add(names[key])

    draw("ABCDXW", BUFFERS)
    draw("IJNK", AXES)
    draw("ijk", COORDINATES)
    draw("fg", ITERATIONS)

    def condition(indent: int) -> str:
        kind = rng.integers(5)
        if kind == 0:
            return ""
        tests = [pick(PREDICATES).format(**names) for _ in range(1 + (kind == 4))]
        tests = [f"T.likely({t})" if rng.integers(3) else t for t in tests]
        return "".join(f"{' ' * (indent + 4 * n)}if {t}:\n" for n, t in enumerate(tests))

    text = HEAD.format(**names)
    for body in _parts(pick(BODIES)):
        fields = {**names, "value": pick(("0.0", "1.0", "0.5"))}
        fields |= {"at": pick(INDICES).format(**names), "inner": "", "when": ""}
        text += _with_condition(body, condition).format(**fields)
    return Adverse(text, _arguments(rng))


def _parts(text: str) -> list[str]:
    return [text]


def _with_condition(text: str, condition: Any) -> str:
    """A body with a predicate around the statement that is marked for one."""
    out = []
    for line in text.splitlines():
        mark = next((m for m in ("{when}", "{inner}") if line.startswith(m)), None)
        if mark is None:
            out.append(line)
            continue
        line = line.removeprefix(mark)
        indent = len(line) - len(line.lstrip())
        head = condition(indent)
        out.append(head.replace("{", "{{").replace("}", "}}") + "    " * head.count("\n") + line)
    return "\n".join(out) + "\n"


def _arguments(rng: np.random.Generator) -> dict[str, Any]:
    m, n, feat = (int(rng.integers(1, 9)), int(rng.integers(1, 8)), int(rng.integers(1, 23)))
    counts = rng.integers(0, n + 1, m)
    if rng.integers(4) == 0:
        counts[rng.integers(m)] = n
    columns = [np.sort(rng.permutation(n)[:count]) for count in counts]
    indices = np.concatenate(columns).astype("int32")

    def values(*shape: int) -> np.ndarray:
        return rng.uniform(-1, 1, shape).astype("float32")

    return {
        "a": values(len(indices)), "b": values(n, feat), "c": values(m, feat),
        "d": values(m, feat), "x": rng.integers(-1, m + 1, m).astype("int32"),
        "p": np.append(0, np.cumsum(counts)).astype("int32"), "q": indices,
        "m": m, "n": n, "l": feat, "nnz": len(indices),
    }  # fmt: skip
