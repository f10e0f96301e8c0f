"""Storage of the operands of an expression, by the names of formats."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from sparsetir.formats.format import Format
from sparsetir.runtime.refusals import wrong

# Kinds of levels: dense, compressed, compressed with repeated coordinates, fixed number of slots.
DENSE, COMPRESSED, REPEATED, SLOTS = "d", "s", "u", "e"
MATRICES = {
    "csr": ("ds", (0, 1)), "csc": ("ds", (1, 0)), "dcsr": ("ss", (0, 1)), "dcsc": ("ss", (1, 0)),
    "coo": ("ue", (0, 1)), "ell": ("de", (0, 1)),
}  # fmt: skip


@dataclass(frozen=True)
class Storage:
    """The storage of an operand or a result.

    dtype : the type of the values
    rank : number of dimensions
    levels : the kind of each level from the root down; empty for a dense array
    order : the dimension of each level; None leaves the order to the program
    pattern : the other operand whose pattern it shares, if any
    changing : whether its values may change between calls, so that any order but the stored one
        costs a permutation per call
    """

    dtype: str
    rank: int
    levels: str = ""
    order: tuple[int, ...] | None = None
    pattern: str | None = None
    changing: bool = False

    @property
    def sparse(self) -> bool:
        """Whether it stores a pattern."""
        return bool(self.levels)

    def typed(self, dtype: str) -> Storage:
        """The storage with values of another type."""
        return replace(self, dtype=dtype)


def storage(caller: str, name: str, format: object, rank: int, dtype: str) -> Storage:
    """The storage for the name of a format, or for a format of `sparsetir.formats`.

    Raises ValueError for formats that do not exist, or not for this rank.
    """
    known = format.name if isinstance(format, Format) else format
    expected = f"'dense', {', '.join(map(repr, MATRICES))}, 'csf', 'csf_1_0_2' or 'dcsf'"
    if not isinstance(known, str):
        raise TypeError(
            f"{caller}: argument '{name}': expected a format, one of {expected}, got {format!r}"
        )
    if known == "dense" or not rank:
        return Storage(dtype, rank)
    if known in MATRICES and rank == 2:
        return Storage(dtype, rank, *MATRICES[known])
    natural, order = tuple(range(rank)), re.fullmatch(r"csf((?:_\d)+)", known)
    if known == "csf":
        return Storage(dtype, rank, csf_levels(rank), natural)
    if known == "dcsf":
        return Storage(dtype, rank, COMPRESSED * rank, natural)
    if order:
        modes = tuple(int(x) for x in order[1][1:].split("_"))
        if tuple(sorted(modes)) == natural:
            return Storage(dtype, rank, csf_levels(rank), modes)
    raise ValueError(
        f"{caller}: argument '{name}': expected a format of {rank} dimensions, such as {expected}, "
        f"got {known!r}"
    )


def result_storage(caller: str, format: object, rank: int, dtype: str) -> Storage:
    """The storage of a sparse result: compressed levels, below a dense one or alone.

    Raises ValueError for formats of other levels, and for scalars.
    """
    whole = format == "coo" or getattr(format, "name", None) == "coo"
    form = storage(caller, "format", "dcsf" if whole else format, rank, dtype)
    if not form.sparse or SLOTS in form.levels:
        expected = (
            "that of a sparse result with an index, of compressed levels, such as 'csr', 'coo', "
            "'csf' or 'dcsf'"
        )
        raise wrong(caller, "format", expected, f"{format!r} of {rank} dimensions")
    return form


def csf_levels(rank: int) -> str:
    """A dense level, then compressed ones; for a vector one compressed level."""
    return COMPRESSED if rank == 1 else DENSE + COMPRESSED * (rank - 1)
