"""The roles of columns and arrays of edge files, by their names: ends, weights, or others."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from pathlib import Path

from sparsetir.runtime.file_errors import GraphError

# Words without punctuation, and without affixes such as "edge_", "_node" and "_id".
NAMES = {
    "target": "target tgt destination dest dst to receiver end cited row rows",
    "source": "source src from sender start origin citing col cols column columns u",
    "other": "time timestamp unixtime ts t date datetime year label labels class type types etype "
    "kind category relation rel name id eid index",
    "weight": "weight weights w wt value values val data rating score count cost distance sign",
}
_ID = "((node|vertex)?(id|idx|index))?"
ROLES = {
    role: re.compile(f"(edge|node|vertex)?({said.replace(' ', '|')}){_ID * (role != 'weight')}")
    for role, said in NAMES.items()
}


def used_columns(path: Path, names: list[str], columns: int) -> tuple[int, ...]:
    """The columns of row (target), column (source) and maybe weight, by their names.

    Without known names the first ones, in that order; () if these are too few or too many.
    """
    roles = roles_of(names)
    if not any(roles) and (len(roles) != columns or columns == 2):
        return tuple(range(columns)) if columns in (2, 3) else ()
    ends = [n for role in ("target", "source") for n, name in enumerate(roles) if name == role]
    if not ends and (columns == 2 or not any(roles[:2])):
        ends = [0, 1]
    weights = [n for n, role in enumerate(roles) if role == "weight" and n not in ends]
    others = [n for n in range(len(roles)) if n not in ends + weights]
    unknown = len(roles) != columns or len(weights) > 1 or None in [roles[n] for n in others]
    if unknown or len(ends) != 2 or roles[ends[0]] == roles[ends[1]] is not None:
        raise GraphError(
            f"{path}: expected {columns} names of columns: of sources (source, from, ..), targets "
            "(target, to, ..), at most one of weights (weight, value, ..), and others to ignore "
            f"(time, label, id, ..), got {', '.join(names)}"
        )
    if others:
        what = ", ".join(names[n].strip() for n in others)
        warnings.warn(f"{path}: columns other than weights are ignored: {what}", stacklevel=2)
    return (*ends, *weights)


def roles_of(names: Iterable[str]) -> list[str | None]:
    """The roles, as in `ROLES` or None, of names of columns and arrays."""
    words = [re.sub(r"[\W_]+", "", name.lower()) for name in names]
    roles = [next((r for r, said in ROLES.items() if said.fullmatch(word)), None) for word in words]
    return ["target" if w == "v" and "u" in words else r for w, r in zip(words, roles, strict=True)]


def weight_of(path: Path, names: Iterable[str]) -> str | None:
    """The name of the array of weights, "data" or such as "edge_weight", or None."""
    names = list(names)
    named = [name for name, role in zip(names, roles_of(names), strict=True) if role == "weight"]
    if len(named) > 1 and "data" not in named:
        raise GraphError(f"{path}: expected weights of one name, got {', '.join(named)}")
    return "data" if "data" in named else next(iter(named), None)
