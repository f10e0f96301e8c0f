"""Rewrite rules for the tests, and what turns a program's arguments into a decomposed one's.

A description is made from a list of axes; its parameters are `a` and the like for the buffers, the
lengths that are no constants, and `ptr_<axis>`, `idx_<axis>`, `nnz_<axis>`, `cols_<axis>`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import sparsetir
from sparsetir.formats.format_part import FormatPart
from sparsetir.formats.infer_indices import infer_format
from sparsetir.formats.rule import FormatRewriteRule

Axes = list[tuple[Any, ...]]


def describe(axes: Axes, buffers: dict[str, str], idtype: str = "int32") -> Any:
    """A function of axes and buffers alone.

    axes : (name, kind, length) or (name, kind, length, parent[, extra]); kind is dense, sparse,
        coo (not unique), fixed or ragged; `extra` the slots of a fixed axis if constant
    """
    arrays, sizes, lines = [b.lower() for b in buffers], [], []
    for name, kind, length, *rest in axes:
        low, end = name.lower(), f'idtype="{idtype}"'
        sizes += [length] if isinstance(length, str) and length not in sizes else []
        if kind == "dense":
            lines.append(f"{name} = T.dense_fixed({length}, {end})")
            continue
        if kind == "fixed":
            slots = rest[1] if len(rest) > 1 else f"cols_{low}"
            sizes += [slots] if isinstance(slots, str) else []
            arrays.append(f"idx_{low}")
            lines.append(
                f"{name} = T.sparse_fixed({rest[0]}, ({length}, {slots}), idx_{low}, {end})"
            )
            continue
        sizes.append(f"nnz_{low}")
        arrays.append(f"ptr_{low}")
        if kind == "ragged":
            of, axis_kind = f"ptr_{low}", "dense_variable"
        else:
            arrays.append(f"idx_{low}")
            of, axis_kind = f"(ptr_{low}, idx_{low})", "sparse_variable"
        end += ", unique=False" if kind == "coo" else ""
        lines.append(f"{name} = T.{axis_kind}({rest[0]}, ({length}, nnz_{low}), {of}, {end})")
    names = ", ".join(a[0] for a in axes)
    lines += [
        f'{b} = T.match_sparse_buffer({b.lower()}, ({names},), "{d}")' for b, d in buffers.items()
    ]
    params = [f"{a}: T.handle" for a in arrays] + [f"{s}: T.{idtype}" for s in sizes]
    text = f"@T.prim_func\ndef desc({', '.join(params)}):\n    " + "\n    ".join(lines)
    return sparsetir.from_source(text + "\n    T.evaluate(0)\n")


def rule(
    name: str,
    axes: Axes,
    before: Sequence[str],
    axis_map: dict[str, list[str]],
    idx_map: Callable[..., Any],
    inv_idx_map: Callable[..., Any],
    buffers: dict[str, str] | None = None,
    idtype: str = "int32",
) -> FormatRewriteRule:
    """A rule whose axes after are those of its description."""
    buffers = buffers or {"A": "float32"}
    return FormatRewriteRule(
        name, describe(axes, buffers, idtype), list(buffers), list(before),
        [a[0] for a in axes], axis_map, idx_map, inv_idx_map,
    )  # fmt: skip


def _same(*c: Any) -> tuple[Any, ...]:
    return c


def _row_blocks(b: int) -> tuple[dict[str, list[str]], Any, Any]:
    return (
        {"I": ["IO", "II"], "J": ["JO", "JI"]},
        lambda i, j: (i // b, j // b, i % b, j % b),
        lambda io, jo, ii, ji: (io * b + ii, jo * b + ji),
    )


IJ = {"I": ["I2"], "J": ["J2"]}
OIJ = {"I": ["O", "I2"], "J": ["J2"]}
O = ("O", "dense", 1)


def _under_root(axes: Axes) -> tuple[Any, ...]:
    return [O, *axes], OIJ, lambda i, j: (0, i, j), lambda o, i, j: (i, j)


def _blocks(b: int, io: Axes, jo: tuple[Any, ...]) -> tuple[Any, ...]:
    axis_map, idx, inv = _row_blocks(b)
    inside: Axes = [("II", "dense", b), ("JI", "dense", b)]
    return [*io, jo, *inside], axis_map, idx, inv


def _dbsr(b: int) -> tuple[Any, ...]:
    return (
        [O, ("IO", "sparse", "mb", "O"), ("JO", "sparse", "nb", "IO"),
         ("II", "dense", b), ("JI", "dense", b)],
        {"I": ["O", "IO", "II"], "J": ["JO", "JI"]},
        lambda i, j: (0, i // b, j // b, i % b, j % b),
        lambda o, io, jo, ii, ji: (io * b + ii, jo * b + ji),
    )  # fmt: skip


def _interleaved(b: int) -> tuple[Any, ...]:
    """Columns of blocks, with the row inside of the block between the two sparse levels."""
    return (
        [
            ("IO", "dense", "mb"),
            ("II", "dense", b),
            ("JO", "sparse", "nb", "IO"),
            ("JI", "dense", b),
        ],
        {"I": ["IO", "II"], "J": ["JO", "JI"]},
        lambda i, j: (i // b, i % b, j // b, j % b),
        lambda io, ii, jo, ji: (io * b + ii, jo * b + ji),
    )


# Axes, axis_map, idx_map and inv_idx_map of each format of a matrix with axes I and J.
MATRIX: dict[str, tuple[Any, ...]] = {
    "csr": ([("I2", "dense", "m"), ("J2", "sparse", "n", "I2")], IJ, _same, _same),
    "csc": (
        [("J2", "dense", "n"), ("I2", "sparse", "m", "J2")],
        IJ,
        lambda i, j: (j, i),
        lambda j, i: (i, j),
    ),
    "dcsr": _under_root([("I2", "sparse", "m", "O"), ("J2", "sparse", "n", "I2")]),
    "coo": _under_root([("I2", "coo", "m", "O"), ("J2", "fixed", "n", "I2", 1)]),
    "ell": ([("I2", "dense", "m"), ("J2", "fixed", "n", "I2")], IJ, _same, _same),
    "ell_rows": _under_root([("I2", "sparse", "m", "O"), ("J2", "fixed", "n", "I2")]),
    "ell_slots": _under_root([("I2", "fixed", "m", "O"), ("J2", "fixed", "n", "I2")]),
    "ragged": ([("I2", "dense", "m"), ("J2", "ragged", "n", "I2")], IJ, _same, _same),
    "dense": ([("I2", "dense", "m"), ("J2", "dense", "n")], IJ, _same, _same),
    "bsr2": _blocks(2, [("IO", "dense", "mb")], ("JO", "sparse", "nb", "IO")),
    "bsr3": _blocks(3, [("IO", "dense", "mb")], ("JO", "sparse", "nb", "IO")),
    "bell": _blocks(2, [("IO", "dense", "mb")], ("JO", "fixed", "nb", "IO")),
    "dbsr": _dbsr(2),
    "interleaved": _interleaved(2),
    "diagonals": (
        [("D", "dense", "d"), ("J2", "dense", "n")],
        {"I": ["D"], "J": ["J2"]},
        lambda i, j: (i - j + 40, j),
        lambda d, j: (d + j - 40, j),
    ),
}


def matrix(
    name: str, dtype: str = "float32", idtype: str = "int32", buffers: Any = ("A",), tag: str = ""
) -> FormatRewriteRule:
    """The rule of a format of MATRIX, for these buffers."""
    axes, axis_map, idx, inv = MATRIX[name]
    named = dict.fromkeys(buffers, dtype)
    return rule(name + tag, axes, ["I", "J"], axis_map, idx, inv, named, idtype)


def csf(names: Sequence[str], order: Sequence[int] | None = None, **more: Any) -> FormatRewriteRule:
    """Compressed fibers, the axes in this order."""
    order = list(order or range(len(names)))
    back = [order.index(n) for n in range(len(names))]
    axes: Axes = [(f"{names[order[0]]}2", "dense", f"n_{names[order[0]].lower()}")]
    for n in order[1:]:
        axes.append((f"{names[n]}2", "sparse", f"n_{names[n].lower()}", axes[-1][0]))
    return rule(
        more.pop("name", "csf"), axes, names, {n: [f"{n}2"] for n in names},
        lambda *c: tuple(c[n] for n in order), lambda *c: tuple(c[n] for n in back), **more,
    )  # fmt: skip


def blocked_csf(names: Sequence[str], b: int, **more: Any) -> FormatRewriteRule:
    """Compressed fibers of blocks of b coordinates on each axis."""
    axes: Axes = [(f"{names[0]}O", "dense", f"n_{names[0].lower()}")]
    for n in names[1:]:
        axes.append((f"{n}O", "sparse", f"n_{n.lower()}", axes[-1][0]))
    axes += [(f"{n}I", "dense", b) for n in names]
    half = len(names)
    return rule(
        more.pop("name", "blocked"), axes, names, {n: [f"{n}O", f"{n}I"] for n in names},
        lambda *c: (*(x // b for x in c), *(x % b for x in c)),
        lambda *c: tuple(c[n] * b + c[n + half] for n in range(half)), **more,
    )  # fmt: skip


def inferred(
    rules: Sequence[FormatRewriteRule], coords: Sequence[np.ndarray], shape: Any, parts: Any
) -> tuple[list[FormatPart], dict[str, Any]]:
    """The format of each rule for its part of the coordinates, and all their arguments."""
    formats = [
        infer_format(r, [c[p] for c in coords], shape) for r, p in zip(rules, parts, strict=True)
    ]
    arguments: dict[str, Any] = {}
    for fmt in formats:
        arguments |= fmt.arguments
        desc = fmt.rule.new_format_desc
        for buf in desc.buffers:
            fill = np.nan if np.dtype(buf.dtype).kind == "f" else 77
            values = np.full(fmt.shape, fill, buf.dtype)
            arguments[fmt.rule.renamed(str(buf.handle.name))] = values
    return formats, arguments


def split(rng: np.random.Generator, count: int, ways: int) -> list[np.ndarray]:
    """Random masks that take each element once; with more than two the last takes nothing."""
    owner = rng.integers(0, ways if ways <= 2 else ways - 1, count)
    return [owner == n for n in range(ways)]
