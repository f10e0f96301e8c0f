"""Names that nothing else has: of what primitives and lowerings make.

Axes, buffers, parameters and iterations are told apart by their names within a function, and the
variables of a block within the block, so whatever makes one asks here.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

from sparsetir.sparse_ir.nodes import SparseFunc, declared, sparse_iterations


def numbered(wish: str, taken: Collection[str]) -> str:
    """The name, with the first number behind it that makes it none of those taken."""
    name, count = wish, 1
    while name in taken:
        name, count = f"{wish}_{count}", count + 1
    return name


def fresh_name(func: SparseFunc, wish: str, also: Collection[str] = ()) -> str:
    """A name that no axis, buffer, parameter or iteration has.

    also : names that are taken besides, of what is not yet in the function
    """
    return numbered(wish, _names(func).union(also))


@lru_cache(maxsize=1)  # a primitive asks for several names, of one function
def _names(func: SparseFunc) -> frozenset[str]:
    """Names of all that a function declares, and of its iterations."""
    params, axes, buffers, _ = declared(func)
    iterations = (str(it.name) for it in sparse_iterations(func))
    return frozenset().union(params, axes, buffers, iterations)
