"""The tables of Sgap (section 7) of measured times, beside the paper's own numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from bench.harness import geomean
from bench.studies.sgap import (
    GROUPS,
    NEW,
    ONE,
    ORIGINAL,
    PART_OF_ROW,
    TABLE_1,
    TABLE_2,
    TABLE_3,
    TABLE_4,
    TABLE_5,
    Point,
)

# A matrix with some N; `ways` holds what was found of each point, by its name.
Cell = dict[str, Any]
# (title, head, rows)
Table = tuple[str, list[str], list[list[str]]]
HERE = "here"
WIDEST = 32


def seconds(way: Any) -> float:
    """What choices are made by: the shortest time."""
    return way["min"]


def static_and_dynamic(
    cells: list[Cell], names: Collection[str], value: Callable[[Any], float] = seconds
) -> tuple[str, float]:
    """The best single choice for all cells, and how much better the best of each cell is.

    names : of ways that all cells have
    value : of a way, the less the better; positive

    The best single one has the least geometric mean.
    """
    found = {n: [value(c["ways"][n]) for c in cells] for n in names}
    static = min(found, key=lambda n: geomean(found[n]))
    best = [min(values) for values in zip(*found.values(), strict=True)]
    return static, geomean(s / b for s, b in zip(found[static], best, strict=True))


def tables(cells: list[Cell], points: list[Point], columns: int) -> list[Table]:
    """Tables 1 to 5; of some only what the points and cells have.

    columns : N of tables 1 to 3
    """
    some = [c for c in cells if c["N"] == columns]
    return [
        *(make(some, points) for make in (table_1, table_2, table_3) if some),
        table_4(cells, points),
        table_5(cells, points),
    ]


def table_1(cells: list[Cell], points: list[Point]) -> Table:
    """Groups of fewer threads than 32, g = 32."""
    base = [p for p in points if p == Point(PART_OF_ROW, WIDEST, p.c, WIDEST)]
    row = [HERE]
    for r in (8, 4):
        ratios = [
            seconds(c["ways"][p.name]) / seconds(c["ways"][Point(p.kind, p.size, p.c, r).name])
            for c in cells for p in base
        ]  # fmt: skip
        row += [_times(geomean(ratios)), _times(geomean(max(1.0, x) for x in ratios))]
    rows = [row] + [[_paper(k), *map(_times, v.values())] for k, v in TABLE_1.items()]
    return "Table 1: {<1/32 row, c col>, r} over r = 32", ["", *TABLE_1["RTX 3090"]], rows


def table_2(cells: list[Cell], points: list[Point]) -> Table:
    """Segments beside groups."""
    names = {p.name for p in points}
    rows = []
    for c in sorted({p.c for p in points}):
        row = [f"c = {c}, {HERE}"]
        for r in GROUPS[1:]:
            groups = [p.name for p in points if (p.kind, p.c, p.r) == (PART_OF_ROW, c, r)]
            segment = Point(ONE, 1, c, r).name
            if not groups or segment not in names:
                row.append("")
                continue
            ratios = [
                min(seconds(cell["ways"][n]) for n in groups) / seconds(cell["ways"][segment])
                for cell in cells
            ]
            row.append(_times(geomean(max(1.0, x) for x in ratios)))
        paper = TABLE_2.get(c, {})
        rows += [
            row,
            [f"c = {c}, {_paper('RTX 3090')}", *(_times(paper.get(r)) for r in GROUPS[1:])],
        ]
    title = "Table 2: {<1 nnz, c col>, r} over the best g of {<1/g row, c col>, r}, at least 1"
    return title, ["", *(f"r = {r}" for r in GROUPS[1:])], rows


def table_3(cells: list[Cell], points: list[Point]) -> Table:
    """The new algorithms over TACO's, each at its best."""
    ratios = [gain(cell, points) for cell in cells]
    rows = [[HERE, _times(geomean(max(1.0, x) for x in ratios))]]
    rows += [[_paper(k), _times(v)] for k, v in TABLE_3.items()]
    return "Table 3: the best new algorithm over the best of TACO's, at least 1", ["", ""], rows


def gain(cell: Cell, points: list[Point]) -> float:
    """How many times as fast the best new algorithm is as the best of TACO's."""
    best = [
        min(seconds(cell["ways"][p.name]) for p in points if p.kind in kinds)
        for kinds in (ORIGINAL, NEW)
    ]
    return best[0] / best[1]


def table_4(cells: list[Cell], points: list[Point]) -> Table:
    """What it gains to tune for each matrix."""
    rows = []
    for n in _columns(cells):
        c = max(c for c in (1, 2, 4) if n % c == 0)
        original = Point(PART_OF_ROW, WIDEST, c, WIDEST)
        if original not in points:
            continue
        tuned = [p.name for p in points if p.kind == PART_OF_ROW]
        ratios = [
            seconds(cell["ways"][original.name]) / min(seconds(cell["ways"][x]) for x in tuned)
            for cell in cells if cell["N"] == n
        ]  # fmt: skip
        rows.append([f"N = {n}, {HERE}", _times(geomean(ratios)), _times(max(ratios))])
        rows += [
            [f"N = {n}, {_paper(k)}", *map(_times, v[n])] for k, v in TABLE_4.items() if n in v
        ]
    title = "Table 4: {<1/g row, c col>, r} tuned for each matrix over g = r = 32"
    return title, ["", "geometric mean", "most"], rows


def table_5(cells: list[Cell], points: list[Point]) -> Table:
    """The best choice for each matrix over the best single one."""
    rows = static_rows(cells, [p.name for p in points if p.kind == PART_OF_ROW])
    title = "Table 5: the best {<1/g row, c col>, r} of each matrix over the best single one"
    return title, ["", "geometric mean", "best single one"], rows


def static_rows(cells: list[Cell], names: Collection[str]) -> list[list[str]]:
    """Rows of table 5, of any ways."""
    rows = []
    for n in _columns(cells):
        static, ratio = static_and_dynamic([c for c in cells if c["N"] == n], names)
        rows.append([f"N = {n}, {HERE}", _times(ratio), static])
        rows += [[f"N = {n}, {_paper(k)}", _times(v[n]), ""] for k, v in TABLE_5.items() if n in v]
    return rows


def _columns(cells: list[Cell]) -> list[int]:
    return sorted({c["N"] for c in cells}, reverse=True)


def _paper(hardware: str) -> str:
    return f"Sgap on {hardware}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
