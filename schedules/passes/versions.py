"""Versions of a function, dispatched by sizes at run time, outside of all its loops.

::

    if feat <= 8:
        with T.sblock("up_to_8"): ...
    else:
        with T.sblock("above_8"): ...
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import s_tir, tirx

from sparsetir.sparse_ir.nodes import substitute
from sparsetir.sparse_ir.position_space import LAYOUTS
from sparsetir.sparse_ir.tir import as_dtype, block_with, dtype_of


class Versions(NamedTuple):
    """Versions by a size.

    index : of the size among the parameters; None if there is only one version
    of : (name, largest size, function), in order; the last one is for all larger sizes
    """

    index: int | None
    of: list[tuple[str, int, tirx.PrimFunc]]


def joined(versions: Versions) -> tirx.PrimFunc:
    """The versions joined in one function."""
    *_, (_, _, last) = versions.of
    return last if versions.index is None else up_to(last.params[versions.index], versions.of)[1]


def either(condition: Any, yes: tirx.PrimFunc, no: tirx.PrimFunc, names: Any) -> tirx.PrimFunc:
    """A function that runs one of two with the same parameters; the names are those of `no`."""
    same = dict(zip(yes.params, no.params, strict=True))
    condition = substitute(condition, same)
    bodies = substitute(yes.body, same), no.body
    parts = [
        s_tir.SBlockRealize([], True, block_with(body.block, name_hint=name))
        for body, name in zip(bodies, names, strict=True)
    ]
    root = s_tir.SBlock([], [], [], "root", tirx.IfThenElse(condition, *parts))
    layouts = {**dict(yes.attrs[LAYOUTS].items()), **dict(no.attrs[LAYOUTS].items())}
    return no.with_body(s_tir.SBlockRealize([], True, root)).with_attr(LAYOUTS, layouts)


def up_to(size: Any, versions: list[tuple[str, int, tirx.PrimFunc]]) -> tuple[str, tirx.PrimFunc]:
    """A function of versions by the largest size of each, the last for all larger ones; and a name.

    The dispatch is by bisection.
    """
    if len(versions) == 1:
        ((name, _, version),) = versions
        return name, version
    middle = len(versions) // 2
    _, most, _ = versions[middle - 1]
    (few, yes), (many, no) = (up_to(size, part) for part in (versions[:middle], versions[middle:]))
    return f"around_{most}", either(size <= as_dtype(most, dtype_of(size)), yes, no, (few, many))
