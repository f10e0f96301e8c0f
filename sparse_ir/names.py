"""Fresh names for what primitives and lowerings create.

Axes, buffers, parameters and iterations are identified by name within a function, and the variables
of a block within the block, so whatever creates one gets its name here.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

from sparsetir.sparse_ir.nodes import SparseFunc, declared, sparse_iterations


def numbered(wish: str, taken: Collection[str]) -> str:
    """The name, with a number appended if it is taken."""
    name, count = wish, 1
    while name in taken:
        name, count = f"{wish}_{count}", count + 1
    return name


def fresh_name(func: SparseFunc, wish: str, also: Collection[str] = ()) -> str:
    """A name that no axis, buffer, parameter or iteration has.

    also : further names that are taken, of things not yet in the function
    """
    return numbered(wish, _names(func).union(also))


@lru_cache(maxsize=1)  # a primitive asks for several names in one function
def _names(func: SparseFunc) -> frozenset[str]:
    """The names of all declarations and iterations of a function."""
    params, axes, buffers, _ = declared(func)
    iterations = (str(it.name) for it in sparse_iterations(func))
    return frozenset().union(params, axes, buffers, iterations)


def block_name(iteration: str, level: int = 0) -> str:
    """The name of the block of a level of an iteration's loops in stage II; 0 is the outermost."""
    return f"{iteration}{level}"


def iteration_of(block: str) -> str:
    """The iteration whose outermost block has this name; "" for other names."""
    return block[:-1] if block.endswith("0") else ""
