"""Walks and maps of trees by TVM's FFI, with classes looked up once.

`tvm_ffi.structural_walk` and `structural_map` find the number of each class anew in every call,
which takes three times as long as the walk of an expression; lowering a function makes thousands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm_ffi.core import TypeSchema
from tvm_ffi.structural import WalkOrder, WalkResult

ADVANCE, SKIP = WalkResult.ADVANCE, WalkResult.SKIP

_PARENTS_FIRST, _CHILDREN_FIRST = int(WalkOrder.PREORDER), int(WalkOrder.POSTORDER)
_WALK: Any = tvm.get_global_func("ffi.StructuralWalk")
_MAP: Any = tvm.get_global_func("ffi.StructuralMap")

Rule = tuple[Any, Callable[[Any], Any]]


def visit_nodes(tree: Any, rules: Sequence[Rule]) -> None:
    """Call functions on the nodes of a TIR or stage-I tree, parents first.

    rules : (class, function); the first one that fits a node is called on it, and gives `ADVANCE`,
        or `SKIP` for what is inside of the node
    """
    _WALK(tree, [(_number(kind), visit) for kind, visit in rules], (), _PARENTS_FIRST)


def map_expr(tree: Any, rules: Sequence[Rule]) -> Any:
    """Rewrite a TIR or stage-I tree, children first.

    rules : (class, function); the first one that fits a node gives what takes its place
    """
    return _MAP(tree, [(_number(kind), replace) for kind, replace in rules], (), _CHILDREN_FIRST)


@functools.cache
def _number(kind: Any) -> int:
    """What the FFI calls a class of nodes."""
    return TypeSchema.from_annotation(kind).origin_type_index
