"""Random programs that iterate over several sparse operands together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

COLUMNS = ("sparse_variable", "sparse_fixed", "dense_variable", "dense_fixed")
SIZE = {x: "p" if x == "e" else "n" for x in "abde"}  # the parameter of a number of columns
TERMS = ("{0} + {1}", "{0} * {1}", "T.max({0}, {1})", "{0} - {1} * 2.0")


@dataclass
class Drawn:
    """A program's text and its arguments; `c` is written."""

    text: str
    arguments: dict[str, Any]


def declare_columns(
    draw: Any, rng: Any, args: dict[str, Any], lines: list[str], x: str, under: tuple[str, int],
    n: int, idtype: str,
) -> tuple[tuple[int, ...], np.ndarray]:  # fmt: skip
    """Declare the axis Jx under another one, of so many positions, and its arrays; of any kind.

    Returns the shape of its values, and the (values,) place of each in (rows, n), -1 for padding.
    """
    rows, parents = under
    kind = draw(st.sampled_from(COLUMNS))
    picks = [np.sort(rng.permutation(n)[: rng.integers(0, n + 1)]) for _ in range(parents)]
    counts = np.array([len(p) for p in picks], np.int64)
    if kind == "dense_fixed":
        lines.append(f"J{x} = T.dense_fixed({SIZE[x]}, '{idtype}')")
        return (parents, n), np.arange(parents * n)
    if kind == "sparse_fixed":
        cols = draw(st.integers(1, n))
        slots = np.full((parents, cols), -1)
        for row, pick in zip(slots, picks, strict=True):
            slots_used = np.sort(rng.permutation(cols)[: min(cols, len(pick))])
            row[slots_used] = pick[: len(slots_used)]
        args |= {f"{x}_cols": cols, f"{x}_idx": slots.reshape(-1).astype(idtype)}
        shape = f"({SIZE[x]}, {x}_cols)"
        lines.append(f"J{x} = T.sparse_fixed({rows}, {shape}, {x}_idx, '{idtype}')")
        places = np.where(slots < 0, -1, slots + n * np.arange(parents)[:, None])
        return (slots.size,), places.reshape(-1)
    size = int(counts.sum())
    args |= {f"{x}_nnz": size}
    args[f"{x}_ptr"] = np.concatenate([[0], np.cumsum(counts)]).astype(idtype)
    arrays = f"{x}_ptr"
    columns = np.concatenate([*map(np.arange, counts), np.zeros(0)]).astype(int)
    if kind == "sparse_variable":
        columns = np.concatenate([*picks, np.zeros(0)]).astype(int)
        args[f"{x}_idx"] = columns.astype(idtype)
        arrays = f"({x}_ptr, {x}_idx)"
    lines.append(f"J{x} = T.{kind}({rows}, ({SIZE[x]}, {x}_nnz), {arrays}, '{idtype}')")
    return (size,), columns + n * np.repeat(np.arange(parents), counts)


@st.composite
def products(draw: Any) -> tuple[Drawn, np.ndarray]:
    """C = A B, perhaps with features of B; rows stored or not, columns of each kind.

    And where C has elements.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    idtype = draw(st.sampled_from(["int32", "int64"]))
    m, l, n = (draw(st.integers(1, 6)) for _ in range(3))
    args: dict[str, Any] = {"m": m, "n": l, "p": n}
    lines = [f"I = T.dense_fixed(m, '{idtype}')", f"L = T.dense_fixed(n, '{idtype}')"]
    lines += [f"N = T.dense_fixed(p, '{idtype}')", f"O = T.dense_fixed(1, '{idtype}')"]
    lines.append(f"F = T.dense_fixed(3, '{idtype}')")
    rows, stored_rows = "I", np.arange(m)
    if draw(st.booleans()):
        stored_rows = np.sort(rng.permutation(m)[: rng.integers(0, m + 1)])
        args |= {"a_rows": len(stored_rows), "a_iptr": np.array([0, len(stored_rows)], idtype)}
        args["a_iidx"], rows = stored_rows.astype(idtype), "I1"
        lines.append(f"I1 = T.sparse_variable(O, (m, a_rows), (a_iptr, a_iidx), '{idtype}')")
    stored = []
    for x, parents, width in (("a", (rows, len(stored_rows)), l), ("e", ("L", l), n)):
        shape, places = declare_columns(draw, rng, args, lines, x, parents, width, idtype)
        mask = np.zeros(parents[1] * width, bool)
        mask[places[places >= 0]] = True
        stored.append(mask.reshape(parents[1], width))
        args[x] = rng.integers(-4, 5, shape).astype("float32")
    feature = draw(st.booleans())
    f, over = (", f", ", F") if feature else ("", "")
    args["e"] = rng.integers(-4, 5, (*args["e"].shape, 3)[: args["e"].ndim + feature])
    args["e"] = args["e"].astype("float32")
    lead = "O, " if rows == "I1" else ""
    lines.append(f"A = T.match_sparse_buffer(a, ({lead}{rows}, Ja))")
    lines.append(f"B = T.match_sparse_buffer(e, (L, Je{over}))")
    args["c"] = np.full((m, n, 3)[: 2 + feature], np.nan, "float32")
    lines.append(f"C = T.match_sparse_buffer(c, (I, N{over}))")
    inner = "T.attach(Je, Ja)" if "Je = T.dense_fixed" not in "".join(lines) else "Je"
    term = f"A[{'o, ' if lead else ''}i, j] * B[j, k{f}]"
    how, first = draw(st.sampled_from([("{c} + {t}", 0.0), ("T.max({c}, {t})", -99.0)]))
    c = f"C[i, k{f}]"
    lines += [
        f"with T.sp_iter([O, {rows}, Ja, {inner}{over}], 'SSRS{'S' * feature}', 'it') as "
        f"[o, i, j, k{f}]:",
        "    with T.init():",
        f"        {c} = {first}",
        f"    {c} = {how.format(c=c, t=term)}",
    ]
    params = [
        f"{name}: T.{idtype if isinstance(value, int) else 'handle'}"
        for name, value in args.items()
    ]
    text = "\n    ".join([f"@T.prim_func\ndef f({', '.join(params)}):", *lines])
    full = np.zeros((m, l), bool)
    full[stored_rows] = stored[0]
    return Drawn(text, args), full.astype(int) @ stored[1].astype(int) > 0


@st.composite
def nested(draw: Any) -> tuple[Drawn, np.ndarray, np.ndarray]:
    """Rows of three operands by merged axes of merged axes; where there is a visit, and the values.

    What is not visited stays NaN.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    idtype = draw(st.sampled_from(["int32", "int64"]))
    m, n = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    args: dict[str, Any] = {"m": m, "n": n}
    lines = [f"I = T.dense_fixed(m, '{idtype}')", f"J = T.dense_fixed(n, '{idtype}')"]
    values, stored = np.zeros((m, n)), {}
    for factor, x in enumerate("abd", 1):
        shape, places = declare_columns(draw, rng, args, lines, x, ("I", m), n, idtype)
        args[x] = rng.integers(-4, 5, shape).astype("float32")
        mask = np.zeros(m * n, bool)
        mask[places[places >= 0]] = True
        dense = np.zeros(m * n)
        dense[places[places >= 0]] = args[x].reshape(-1)[places >= 0]
        stored[f"J{x}"], values = mask.reshape(m, n), values + factor * dense.reshape(m, n)
        lines.append(f"{x.upper()} = T.match_sparse_buffer({x}, (I, J{x}))")
    kinds = {"union": np.logical_or, "intersect": np.logical_and, "difference": np.greater}

    def pairs(inner: Any) -> Any:
        return st.tuples(st.sampled_from([*kinds]), inner, inner).filter(lambda t: t[1] != t[2])

    def text_of(tree: Any) -> str:
        return tree if tree in stored else f"T.{tree[0]}({', '.join(map(text_of, tree[1:]))})"

    def visited(tree: Any) -> np.ndarray:
        return stored[tree] if tree in stored else kinds[tree[0]](*map(visited, tree[1:]))

    tree = draw(pairs(st.recursive(st.sampled_from(["Ja", "Jb", "Jd"]), pairs, max_leaves=4)))
    term, loops = "A[i, j] + B[i, j] * 2.0 + D[i, j] * 3.0", f"[I, {text_of(tree)}]"
    args["c"] = np.full((m, n), np.nan, "float32")
    lines += [
        "C = T.match_sparse_buffer(c, (I, J))",
        f"with T.sp_iter({loops}, 'SS', 'it') as [i, j]:",
        f"    C[i, j] = {term}",
    ]
    params = [
        f"{name}: T.{idtype if isinstance(value, int) else 'handle'}"
        for name, value in args.items()
    ]
    text = "\n    ".join([f"@T.prim_func\ndef f({', '.join(params)}):", *lines])
    return Drawn(text, args), visited(tree), values


@st.composite
def programs(draw: Any, most: int = 7) -> Drawn:
    """Two or three operands, rows stored or not, columns of each kind; merged once or twice.

    most : columns
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    idtype = draw(st.sampled_from(["int32", "int64"]))
    m, n = draw(st.integers(1, 6)), draw(st.integers(1, most))
    operands = "abd"[: draw(st.sampled_from([2, 2, 3]))]
    how = {level: draw(st.sampled_from(["union", "intersect"])) for level in "IJ"}
    own_rows = draw(st.booleans())
    lines = [f"I = T.dense_fixed(m, '{idtype}')", f"J = T.dense_fixed(n, '{idtype}')"]
    lines += [f"O = T.dense_fixed(1, '{idtype}')", f"K = T.dense_fixed(3, '{idtype}')"]
    args: dict[str, Any] = {"m": m, "n": n}
    rows_of: dict[str, str] = {}
    over: dict[str, list[str]] = {}
    for x in operands:
        stored_rows = own_rows and draw(st.booleans())
        rows, parents = "I", m
        if own_rows:
            rows = f"I{x}"
            lines.append(f"I{x} = T.dense_fixed(m, '{idtype}')")
        if stored_rows:
            held = np.sort(rng.permutation(m)[: rng.integers(0, m + 1)])
            args |= {f"{x}_rows": len(held), f"{x}_iptr": np.array([0, len(held)], idtype)}
            args[f"{x}_iidx"], parents = held.astype(idtype), len(held)
            shape, arrays = f"(m, {x}_rows)", f"({x}_iptr, {x}_iidx)"
            lines[-1] = f"I{x} = T.sparse_variable(O, {shape}, {arrays}, '{idtype}')"
        shape_of, _ = declare_columns(draw, rng, args, lines, x, (rows, parents), n, idtype)
        args[x] = rng.integers(-4, 5, shape_of).astype("float32")
        over[x] = [*(["O"] if stored_rows else []), rows, f"J{x}"]
        lines.append(f"{x.upper()} = T.match_sparse_buffer({x}, ({', '.join(over[x])},))")
        rows_of[x] = rows
    merged_rows = f"T.{how['I']}({', '.join(rows_of[x] for x in operands)})" if own_rows else "I"
    if own_rows:
        lines.append(f"R = {merged_rows}")
        merged_rows = "R"
    columns = f"T.{how['J']}({', '.join(f'J{x}' for x in operands)})"
    loads = [
        f"{x.upper()}[{', '.join({'O': 'o', 'J': 'j'}.get(a[0], 'i') for a in over[x])}]"
        for x in operands
    ]
    term = draw(st.sampled_from(TERMS)).format(*loads[:2])
    term = f"({term}) * {loads[2]}" if len(operands) == 3 and draw(st.booleans()) else term
    term = f"({term}) + {loads[-1]}" if draw(st.booleans()) else f"({term})"
    feature = draw(st.booleans())
    reduced = draw(st.booleans())
    index = ["i", *([] if reduced else ["j"]), *(["k"] if feature else [])]
    axes = [a for a, letter in zip("IJK", "ijk", strict=True) if letter in index]
    if feature:
        args["w"] = rng.integers(-3, 4, (n, 3)).astype("float32")
        lines.append("W = T.match_sparse_buffer(w, (J, K))")
        term = f"({term}) * W[j, k]"
    sizes = {"I": m, "J": n, "K": 3}
    args["c"] = np.full([sizes[a] for a in axes], np.nan, "float32")
    lines.append(f"C = T.match_sparse_buffer(c, ({', '.join(axes)},))")
    target = f"C[{', '.join(index)}]"
    loops = ["O", merged_rows, columns, *(["K"] if feature else [])]
    kinds = "SS" + ("R" if reduced else "S") + ("S" if feature else "")
    body = [f"with T.sp_iter([{', '.join(loops)}], '{kinds}', 'it') as [o, i, j{', k' * feature}]:"]
    if reduced or draw(st.booleans()):
        body += ["    with T.init():", f"        {target} = 0.0"]
        term = f"{target} + ({term})"
    body.append(f"    {target} = {term}")
    params = [
        f"{name}: T.{idtype if isinstance(value, int) else 'handle'}"
        for name, value in args.items()
    ]
    text = "\n    ".join([f"@T.prim_func\ndef f({', '.join(params)}):", *lines, *body])
    return Drawn(text, args)
