"""The SpMM algorithms of Sgap (section 3), and what the paper's tables say of them.

`{<data, c col>, r}`: a thread has so much data of the sparse matrix (elements or rows, or a part of
a row) and c columns of the dense one, and r threads reduce together. Each is a config of
:class:`sparsetir.schedules.gpu.spmm_groups.Groups`, in which a block has one tile of c
columns, and its threads lie along the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

from sparsetir.schedules.gpu.spmm_groups import Groups

THREADS = 256  # of a block
ELEMENTS, ROWS, PART_OF_ROW, ONE = "g nnz", "x row", "1/g row", "1 nnz"
ORIGINAL, NEW = (ELEMENTS, ROWS), (PART_OF_ROW, ONE)  # those of TACO, and those of Sgap

GROUPS = (2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Point:
    """An algorithm.

    kind : of data: ELEMENTS, ROWS, PART_OF_ROW or ONE
    size : g or x
    c : columns
    r : threads that reduce together
    """

    kind: str
    size: int
    c: int
    r: int = 1

    @property
    def name(self) -> str:
        """As the paper writes it: "{<1/32 row, 4 col>, 8}"."""
        data = self.kind.replace("g", str(self.size), 1).replace("x", str(self.size))
        return f"{{<{data}, {self.c} col>, {self.r}}}"

    def config(self, columns: int) -> Groups:
        """The config for B of so many columns; a constant of the kernel if c does not divide it."""
        vector = gcd(self.c, columns)
        feat = None if columns % self.c == 0 else columns
        own: dict[str, Any] = {
            ELEMENTS: {"split": "non-zeros", "work": self.size},
            ROWS: {"work": self.size},
            PART_OF_ROW: {"lanes": self.size, "group": self.r},
            ONE: {"split": "non-zeros", "group": self.r},
        }[self.kind]
        return Groups(
            threads=1, vector=vector, coarsen=self.c // vector, block=THREADS, feat=feat,
            occupancy=None, **own,
        )  # fmt: skip


def points(full: bool = False, columns: tuple[int, ...] = (1, 2, 4)) -> list[Point]:
    """What is compared.

    full : all of g and r, and more of TACO's algorithms
    """
    out = [Point(ELEMENTS, g, c) for c in columns for g in ((4, 8, 16, 32) if full else (8, 32))]
    out += [Point(ROWS, x, c) for c in columns for x in ((1, 2, 4) if full else (1,))]
    for g in (4, 8, 16, 32) if full else (8, 32):
        out += [
            Point(PART_OF_ROW, g, c, r)
            for c in columns
            for r in GROUPS
            if r <= g and (full or r > 2)
        ]
    return out + [Point(ONE, 1, c, r) for c in columns for r in (1, *GROUPS)]


# -- what the paper measured ----------------------------------------------------------------------

COLUMNS = 46  # N of tables 1 to 3
# Table 1: {<1/32 row, c col>, r} over r = 32; "norm" counts what is slower as 1.
TABLE_1 = {
    "RTX 2080": {"r = 8": 2.451, "r = 8 norm": 2.478, "r = 4": 2.456, "r = 4 norm": 2.483},
    "RTX 3090": {"r = 8": 2.236, "r = 8 norm": 2.284, "r = 4": 2.259, "r = 4 norm": 2.307},
    "Tesla V100": {"r = 8": 2.086, "r = 8 norm": 2.143, "r = 4": 2.094, "r = 4 norm": 2.150},
}
# Table 2, RTX 3090: {<1 nnz, c col>, r} over the best g of {<1/g row, c col>, r}; by c and r.
TABLE_2 = {
    1: {4: 1.008, 8: 1.025, 16: 1.085, 32: 1.272},
    2: {4: 1.019, 8: 1.045, 16: 1.102, 32: 1.291},
    4: {4: 1.063, 8: 1.095, 16: 1.205, 32: 1.381},
}
# Table 3: the best of the new algorithms over the best of TACO's.
TABLE_3 = {"RTX 3090": 1.191, "RTX 2080": 1.098, "Tesla V100": 1.223}
# Table 4: {<1/g row, c col>, r} tuned over g = r = 32; (geometric mean, most) by N.
TABLE_4 = {
    "RTX 3090": {128: (2.295, 4.316), 64: (2.181, 4.432), 16: (1.997, 4.271), 4: (2.046, 7.819)},
    "RTX 2080": {128: (1.938, 4.379), 64: (1.927, 4.430), 16: (1.995, 5.019), 4: (2.307, 8.582)},
    "Tesla V100": {128: (1.874, 3.724), 64: (1.824, 3.846), 16: (1.693, 3.388), 4: (1.852, 6.114)},
}
# Table 5: the best choice for each matrix over the best single one, by N.
TABLE_5 = {
    "RTX 3090": {128: 1.124, 64: 1.114, 16: 1.310, 4: 1.406},
    "RTX 2080": {128: 1.095, 64: 1.114, 16: 1.276, 4: 1.310},
    "Tesla V100": {128: 1.137, 64: 1.177, 16: 1.367, 4: 1.326},
}
