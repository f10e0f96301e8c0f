"""Walks and maps of trees through TVM's FFI, with classes looked up once.

`tvm_ffi.structural_walk` and `structural_map` look up the number of each class in every call, which
takes three times as long as walking an expression; lowering a function makes thousands of calls.
Passing a function takes as long again, so :func:`collect` and :func:`replace_variables` do that
once, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, tirx
from tvm_ffi.core import TypeSchema
from tvm_ffi.structural import WalkOrder, WalkResult

ADVANCE, SKIP = WalkResult.ADVANCE, WalkResult.SKIP

_PARENTS_FIRST, _CHILDREN_FIRST = int(WalkOrder.PREORDER), int(WalkOrder.POSTORDER)
_WALK: Any = tvm.get_global_func("ffi.StructuralWalk")
_MAP: Any = tvm.get_global_func("ffi.StructuralMap")
_NONE: Any = tvm_ffi.convert(())

Rule = tuple[Any, Callable[[Any], Any]]


def visit_nodes(tree: Any, rules: Sequence[Rule]) -> None:
    """Call functions on the nodes of a TIR or stage-I tree, parents first.

    rules : (class, function); the first rule for a node's class is called, and returns `ADVANCE`,
        or `SKIP` to omit the node's children
    """
    _WALK(tree, [(_number(kind), visit) for kind, visit in rules], _NONE, _PARENTS_FIRST)


def map_expr(tree: Any, rules: Sequence[Rule]) -> Any:
    """Rewrite a TIR or stage-I tree, children first.

    rules : (class, function); the first rule for a node's class returns its replacement

    A function's error is raised after the walk: one that propagates through the walk frees memory
    twice. (TVM 0.27.)
    """
    errors: list[BaseException] = []

    def guarded(replace: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(node: Any) -> Any:
            if errors:
                return node
            try:
                return replace(node)
            except BaseException as error:
                errors.append(error)
                return node

        return call

    guards = [(_number(kind), guarded(replace)) for kind, replace in rules]
    new = _MAP(tree, guards, _NONE, _CHILDREN_FIRST)
    if errors:
        raise errors.pop()
    return new


def access_rules(place: Callable[[Any, Any], tuple[Any, list[Any]] | None]) -> list[Rule]:
    """Rules that move loads and stores.

    place : returns the new buffer and indices of an access, or None to keep it
    """

    def load(node: Any) -> Any:
        new = place(node.source, node.indices)
        return node if new is None else tirx.BufferLoad(*new)

    def store(node: Any) -> Any:
        new = place(node.buffer, node.indices)
        return node if new is None else tirx.BufferStore(new[0], node.value, new[1], node.span)

    return [(ir.TensorLoad, load), (tirx.BufferStore, store)]


# Rules and the list or dict that they fill; a call removes the entry while it uses it.
_COLLECTORS: dict[Any, tuple[Any, list[Any]]] = {}
_REPLACERS: list[tuple[Any, dict[int, Any]]] = []


def collect(
    kinds: tuple[Any, ...], trees: Iterable[Any], nested: bool = True, past: tuple[Any, ...] = ()
) -> list[Any]:
    """The nodes of some classes in trees, parents first; None counts as an empty tree.

    nested : whether to descend into matching nodes
    past : classes of nodes to skip, with their children
    """
    key = kinds, nested, past
    rules, nodes = _COLLECTORS.pop(key, None) or _collector(*key)
    try:
        for tree in trees:
            if tree is not None:
                _WALK(tree, rules, _NONE, _PARENTS_FIRST)
        return [*nodes]
    finally:
        nodes.clear()
        _COLLECTORS[key] = rules, nodes


def _collector(
    kinds: tuple[Any, ...], nested: bool, past: tuple[Any, ...]
) -> tuple[Any, list[Any]]:
    nodes: list[Any] = []

    def alone(node: Any) -> Any:
        nodes.append(node)
        return SKIP

    rules = [(_number(kind), lambda _: SKIP) for kind in past]
    rules += [(_number(kind), nodes.append if nested else alone) for kind in kinds]
    return tvm_ffi.convert(rules), nodes


def replace_variables(tree: Any, values: Mapping[int, Any]) -> Any:
    """Rewrite a TIR or stage-I tree with values for variables, which are given by handle."""
    try:
        rules, now = _REPLACERS.pop()
    except IndexError:  # all are in use by other calls
        rules, now = _replacer()
    now.update(values)
    try:
        return _MAP(tree, rules, _NONE, _CHILDREN_FIRST)
    finally:
        now.clear()
        _REPLACERS.append((rules, now))


def _replacer() -> tuple[Any, dict[int, Any]]:
    now: dict[int, Any] = {}
    return tvm_ffi.convert([(_number(ir.Var), lambda v: now.get(v.__chandle__(), v))]), now


@functools.cache
def _number(kind: Any) -> int:
    """The FFI's number of a class of nodes."""
    return TypeSchema.from_annotation(kind).origin_type_index
