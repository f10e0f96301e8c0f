"""The rules of stage I: what makes a function well-formed.

One small function per rule. This file holds the rules on declarations; those on iterations and
statements are in :mod:`sparsetir.sparse_ir.verify_body`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, product
from typing import Any, NamedTuple

import tvm_ffi
from tvm import ir
from tvm.sym import Analyzer

from sparsetir.sparse_ir.annotations import ORDERED, is_scheduled, written_by_hand_problems
from sparsetir.sparse_ir.computed import computed_problems
from sparsetir.sparse_ir.errors import IllFormedError
from sparsetir.sparse_ir.legal import reorderable
from sparsetir.sparse_ir.nodes import (
    AXIS_KINDS,
    Axis,
    Names,
    SparseBuffer,
    SparseFunc,
    declared,
    flat_axes,
    merged_parent,
    same_indices,
    sparse_iterations,
    stores_of,
)
from sparsetir.sparse_ir.open_axes import is_open, open_axis_problems
from sparsetir.sparse_ir.promises import assumption_problems, promise_problems
from sparsetir.sparse_ir.rows import row_problems
from sparsetir.sparse_ir.tir import size_text, slots_of
from sparsetir.sparse_ir.verify_body import body_problems, index_dtype, names
from sparsetir.sparse_ir.verify_sites import Broken, Found, Texts, used_variables

# kind -> the fields that an axis of this kind has; the others are None. A merged axis may also have
# a parent.
FIELDS: dict[str, tuple[str, ...]] = {
    "dense_fixed": (),
    "dense_variable": ("parent", "nnz", "indptr"),
    "sparse_fixed": ("parent", "nnz_cols", "indices"),
    "sparse_variable": ("parent", "nnz", "indptr", "indices"),
    "union": ("of",),
    "intersect": ("of",),
    "difference": ("of",),
}
OPTIONAL = ("parent", "nnz", "nnz_cols", "indptr", "indices", "of")


class Problem(NamedTuple):
    """A broken rule.

    span : the nearest node in the script, None for a function built by hand
    of : the iteration that the problem is of, or ""
    """

    span: Any
    func: str
    of: str
    message: str

    def __str__(self) -> str:
        where = "" if self.span is None else f"{self.span.source_name.name}:{self.span.line}: "
        of = f"sp_iter '{self.of}': " if self.of else ""
        return f"{where}in function '{self.func}': {of}{self.message}"


class Declarations(NamedTuple):
    """The declarations that a rule checks.

    func : the whole function, for rules that compare declarations
    axes, buffers : its last ones, which are still to be checked
    names : all its declarations, by name
    """

    func: SparseFunc
    axes: list[Axis]
    buffers: list[SparseBuffer]
    names: Names


def verify(func: SparseFunc, known: Sequence[Any] = (), before: SparseFunc | None = None) -> None:
    """Raise IllFormedError if the function breaks a rule of stage I.

    Parameters
    ----------
    func : SparseFunc
        The function.
    known : sequence
        Verified iterations in its body, see `body_problems`.
    before : SparseFunc, optional
        A verified function whose declarations are a prefix of this one's.

    Raises
    ------
    IllFormedError
        `file:line: in function 'name': what is wrong`, without file and line if the function was
        built by hand.
    """
    problem = find_problem(func, known=known, before=before)
    if problem is not None:
        raise IllFormedError(str(problem))


@functools.lru_cache(maxsize=16)
def verify_once(func: SparseFunc) -> None:
    """Verify a function, unless it is among the last ones verified."""
    verify(func)


def find_problem(
    func: SparseFunc,
    spans: Mapping[str, Any] | None = None,
    known: Sequence[Any] = (),
    before: SparseFunc | None = None,
    by_hand: bool = False,
) -> Problem | None:
    """The first broken rule, or None.

    spans : positions of the axes by name; axes carry none themselves
    known, before : see :func:`verify`
    by_hand : whether it is a user's program, which may not contain what only primitives write
    """
    axes, buffers = (len(before.axes), len(before.buffers)) if before is not None else (0, 0)
    new = Declarations(func, func.axes[axes:], func.buffers[buffers:], declared(func))
    rest: list[Found] = [rule(func) for rule in ATTRIBUTES]
    if by_hand:
        rest.append(written_by_hand_problems(func))
    rest.append(body_problems(func, known))
    if before is None:
        rest.append(_order(func))
    for where, message, of in chain(_declaration_problems(new), *rest):
        span = (spans or {}).get(where.name) if isinstance(where, Axis) else where
        return Problem(span or func.span, func.name, of, message)
    return None


def _declaration_problems(new: Declarations) -> Found:
    for what, rule in DECLARATIONS:
        if what == "all":
            yield from rule(new)
        for item in {"axis": new.axes, "buffer": new.buffers}.get(what, ()):
            for text in rule(item, f"{what} '{item.name}'", new):
                yield Broken(item if what == "axis" else item.var.span, text)


def _order(func: SparseFunc) -> Found:
    """Iterations of a user's program whose result depends on the order of their visits."""
    if is_scheduled(func):
        return
    for it in sparse_iterations(func):
        problem = None if ORDERED in it.annotations else reorderable(func, it)
        if problem is not None:
            yield Broken(it.span, f"its visits have no order, but {problem}", it.name)


def _repeated(items: Sequence[Any], by_name: Mapping[str, Any]) -> Iterator[Any]:
    """The items whose name an earlier one has."""
    if len(items) == len(by_name):
        return
    seen: set[str] = set()
    for item in items:
        if item.name in seen:
            yield item
        seen.add(item.name)


def _names_differ(new: Declarations) -> Found:
    for param in _repeated(new.func.params, new.names.params):
        yield Broken(param.span, f"two parameters are named '{param.name}'")
    for axis in _repeated(new.func.axes, new.names.axes):
        yield Broken(axis, f"two axes are named '{axis.name}'; axes are identified by name")
    for buffer in _repeated(new.func.buffers, new.names.buffers):
        yield Broken(buffer.var.span, f"two buffers are named '{buffer.name}'")


def _axis_kind(axis: Axis, label: str, _: Declarations) -> Texts:
    if axis.kind not in AXIS_KINDS:
        yield f"{label}: expected a kind among {', '.join(AXIS_KINDS)}, got '{axis.kind}'"
    if axis.idtype not in ("int32", "int64"):
        yield f"{label}: expected idtype 'int32' or 'int64', got '{axis.idtype}'"


def _axis_fields(axis: Axis, label: str, _: Declarations) -> Texts:
    for field in OPTIONAL:
        there = getattr(axis, field) is not None
        if (field == "parent" and axis.is_merged) or (field == "nnz" and is_open(axis)):
            continue
        if there != (field in FIELDS[axis.kind]):
            has = "has no" if there else "needs a value for"
            yield f"{label}: a {axis.kind} axis {has} '{field}'"


def _axis_parent(new: Declarations) -> Found:
    later = {axis.name for axis in new.axes}
    seen = {name: axis for name, axis in new.names.axes.items() if name not in later}
    for axis in new.axes:
        parent = axis.parent
        if parent is not None and parent.name not in seen:
            yield Broken(
                axis,
                f"axis '{axis.name}': its parent '{parent.name}' is not an axis of "
                f"'{new.func.name}' listed before it",
            )
        if parent is not None and not same_axis(parent, seen[parent.name]):
            yield Broken(
                axis, f"axis '{axis.name}': its parent differs from the axis '{parent.name}'"
            )
        seen[axis.name] = axis


def _axis_merged(axis: Axis, label: str, new: Declarations) -> Texts:
    if not axis.is_merged:
        return
    label += f" = {axis.kind}({', '.join(a.name for a in axis.of)})"
    for one in axis.members:
        known = new.names.axes.get(one.name)
        if known is None or not same_axis(one, known):
            yield f"{label}: '{one.name}' is not an axis of '{new.func.name}'"
        elif not one.unique:
            yield (
                f"{label}: expected axes whose coordinates increase under each parent, but "
                f"'{one.name}' may store one twice (unique=False)"
            )
        elif one.idtype != axis.idtype or not tvm_ffi.structural_equal(one.length, axis.length):
            yield (
                f"{label}: expected axes of one length and idtype, {size_text(axis.length)} and "
                f"{axis.idtype}, got '{one.name}' of {size_text(one.length)} and {one.idtype}"
            )
    if len({a.name for a in axis.of}) < max(2, len(axis.of)):
        yield f"{label}: expected two or more axes, each once"
    for one, other in product(axis.merged, _inside(axis)):
        if one.name == other.name and not tvm_ffi.structural_equal(one, other):
            yield f"{label}: expected '{one.name}' attached in each place or none"
    parent = merged_parent(axis.of, [a for a in new.func.axes if a.is_merged])
    if (None if parent is None else parent.name) != getattr(axis.parent, "name", None):
        yield f"{label}: its parent is not that of its axes"


def _inside(axis: Axis) -> list[Any]:
    """The axes in a merged axis, once per occurrence."""
    of = [] if axis.of is None else axis.of
    return [x for a in of for x in (a, *(_inside(a) if isinstance(a, Axis) else ()))]


def _axis_open(axis: Axis, label: str, new: Declarations) -> Texts:
    return open_axis_problems(axis, label, new.func)


def _axis_sizes(axis: Axis, label: str, _: Declarations) -> Texts:
    for field in ("length", "nnz", "nnz_cols"):
        size = getattr(axis, field)
        if size is not None and not index_dtype(size):
            yield f"{label}: expected '{field}' of type int32 or int64, got {describe_type(size)}"


def _axis_parameters(axis: Axis, label: str, new: Declarations) -> Texts:
    for field in ("length", "nnz", "nnz_cols", "indptr", "indices"):
        value = getattr(axis, field)
        for var in used_variables(value) if value is not None else ():
            if not new.names.has_param(var):
                yield (
                    f"{label} belongs to another function or its '{field}' is not a parameter of "
                    f"'{new.func.name}': '{var.name}' is none"
                )


def _axis_handles(axis: Axis, label: str, _: Declarations) -> Texts:
    for field in ("indptr", "indices"):
        value = getattr(axis, field)
        if value is not None and not is_handle(value):
            got = describe_type(value)
            yield f"{label}: expected a T.handle parameter for '{field}', got {got}"


def _shared_indptr(new: Declarations) -> Found:
    if all(axis.indptr is None for axis in new.axes):
        return
    owner: dict[Any, Axis] = {}
    for axis in new.func.axes:
        if axis.indptr is None:
            continue
        first = owner.setdefault(axis.indptr, axis)
        pair = f"axes '{first.name}' and '{axis.name}' share the indptr '{axis.indptr.name}'"
        if not tvm_ffi.structural_equal(first.parent, axis.parent):  # up to names
            yield Broken(
                axis,
                f"{pair}, but their parents '{first.parent.name}' and '{axis.parent.name}' are not "
                "alike, of one length and the same arrays",
            )
        if first.idtype != axis.idtype:
            yield Broken(
                axis, f"{pair}, but their idtypes differ: {first.idtype} and {axis.idtype}"
            )


def _handle_once(new: Declarations) -> Found:
    if all(axis.kind == "dense_fixed" for axis in new.axes) and not any(
        buffer.handle is not None for buffer in new.buffers
    ):
        return
    uses: dict[Any, tuple[str, str]] = {}
    for axis in new.func.axes:
        for field in ("indptr", "indices"):
            handle = getattr(axis, field)
            if handle is None:
                continue
            use = f"the {field} of axis '{axis.name}'"
            other, before = uses.setdefault(handle, (field, use))
            if other != field:
                yield Broken(
                    axis, f"handle '{handle.name}' is bound twice: to {before} and to {use}"
                )
    for buffer in new.func.buffers:
        if buffer.handle is None:
            continue
        use = f"buffer '{buffer.name}'"
        if buffer.handle in uses and not _is_coordinates(new.func, buffer):
            yield Broken(
                buffer.var.span,
                f"handle '{buffer.handle.name}' is bound twice: to {uses[buffer.handle][1]} "
                f"and to {use}",
            )
        uses[buffer.handle] = "buffer", use


def _is_coordinates(func: SparseFunc, buffer: SparseBuffer) -> bool:
    """Whether a buffer holds the coordinates or offsets of an axis, and nothing else uses them.

    The axis then implies the contents of the array, which structure checks verify.
    """
    of = [a for a in func.axes if any(h is not None and h.same_as(buffer.handle)
                                      for h in (a.indices, a.indptr))]  # fmt: skip
    over = list(buffer.axes or ())
    if len(of) != 1 or not of[0].is_sparse or not over:
        return False
    (axis,), (*above, mine) = of, over
    levels = axis.ancestors()
    slots = axis.kind == "sparse_fixed"
    outer = levels[: len(above)] if slots else mine.ancestors()[:-1]
    if [a.name for a in outer] != [a.name for a in above]:
        return False
    if above and not slots:  # the elements of each row, by number
        count = mine.nnz if mine.kind == "dense_variable" else None
    else:
        count = mine.length if mine.kind == "dense_fixed" else None
    length = slots_of(levels[len(above) :], axis.idtype) if slots else axis.nnz
    if axis.indptr is not None and axis.indptr.same_as(buffer.handle):
        parent = axis.parent
        if parent.kind not in ("dense_fixed", "sparse_variable"):
            return False
        length = (parent.length if parent.kind == "dense_fixed" else parent.nnz) + 1
    used = {a.name for b in func.buffers for a in b.axes or ()}
    used |= {a.name for it in sparse_iterations(func) for a in flat_axes(it.axes)}
    return (
        count is not None
        and mine.idtype == axis.idtype == buffer.dtype
        and Analyzer().can_prove_equal(count, length)
        and axis.name not in used
        and not any(s.buffer.same_as(buffer.var) for s in stores_of(func.body))
    )


def _buffer_handle(buffer: SparseBuffer, label: str, new: Declarations) -> Texts:
    handle = buffer.handle
    if handle is None and buffer.axes is None:
        yield f"{label} has neither axes nor a handle"
    if handle is not None and not new.names.has_param(handle):
        yield f"{label}: its handle '{handle.name}' is not a parameter of '{new.func.name}'"
    if handle is not None and not is_handle(handle):
        yield (
            f"{label}: expected a T.handle parameter, got '{handle.name}' of type "
            f"{describe_type(handle)}"
        )


def _buffer_axes_known(buffer: SparseBuffer, label: str, new: Declarations) -> Texts:
    known = new.names.axes
    for axis in buffer.axes or ():
        if axis.name not in known:
            yield f"{label}: '{axis.name}' is not an axis of '{new.func.name}'"
        elif axis.is_merged:
            yield (
                f"{label}: the {axis.kind} '{axis.name}' stores nothing; expected one of its axes "
                f"{names(axis.members)}, or a dense axis"
            )
        elif not same_axis(axis, known[axis.name]):
            yield (
                f"{label}: its axis '{axis.name}' differs from the axis of that name in "
                f"'{new.func.name}'"
            )


def _buffer_axes_order(buffer: SparseBuffer, label: str, _: Declarations) -> Texts:
    before: set[str] = set()
    for axis in buffer.axes or ():
        if axis.name in before:
            yield f"{label}: axis '{axis.name}' occurs twice in {names(buffer.axes)}"
        if axis.parent is not None and axis.parent.name not in before:
            yield (
                f"{label}: expected axis '{axis.parent.name}', the parent of '{axis.name}', "
                f"before it, got {names(buffer.axes)}"
            )
        before.add(axis.name)


def _buffer_siblings(buffer: SparseBuffer, label: str, _: Declarations) -> Texts:
    child: dict[str, str] = {}
    for axis in (a for a in buffer.axes or () if a.parent is not None):
        first = child.setdefault(axis.parent.name, axis.name)
        if first != axis.name:
            yield (
                f"{label}: axes '{first}' and '{axis.name}' are both children of "
                f"'{axis.parent.name}', so its elements have no storage order"
            )


def _buffer_shape(buffer: SparseBuffer, label: str, new: Declarations) -> Texts:
    shape, lengths = list(buffer.var.ty.shape), [a.length for a in buffer.axes or ()]
    for var in (v for size in shape for v in used_variables(size)):
        if not new.names.has_param(var):
            yield f"{label}: '{var.name}' in its shape is not a parameter of '{new.func.name}'"
    for size in shape:
        if not index_dtype(size):
            yield f"{label}: expected sizes of type int32 or int64, got {describe_type(size)}"
    if buffer.axes is not None and not same_indices(lengths, shape):
        expected, got = (", ".join(map(str, sizes)) for sizes in (lengths, shape))
        yield f"{label}: expected the shape [{expected}] of its axes, got [{got}]"


def same_axis(a: Axis, b: Axis) -> bool:
    """Whether two axes are the same: name, fields and ancestors."""
    return a.name == b.name and tvm_ffi.structural_equal(a, b)


def is_handle(value: Any) -> bool:
    """Whether `value` is a variable of pointer type."""
    return isinstance(value, ir.Var) and isinstance(value.ty, ir.PointerType)


def describe_type(value: Any) -> str:
    """The type of an expression for a message."""
    ty: Any = getattr(value, "ty", None)
    if isinstance(ty, ir.PrimType):
        return str(ty.dtype)
    return "a handle" if isinstance(ty, ir.PointerType) else type(value).__name__


# What each rule is about: single axes or buffers, which it takes with their label, or all of them.
DECLARATIONS: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("all", _names_differ),
    ("axis", _axis_kind),
    ("axis", _axis_fields),
    ("all", _axis_parent),
    ("axis", _axis_merged),
    ("axis", _axis_sizes),
    ("axis", _axis_parameters),
    ("axis", _axis_handles),
    ("axis", _axis_open),
    ("all", _shared_indptr),
    ("buffer", _buffer_handle),
    ("all", _handle_once),
    ("buffer", _buffer_axes_known),
    ("buffer", _buffer_axes_order),
    ("buffer", _buffer_siblings),
    ("buffer", _buffer_shape),
)
ATTRIBUTES: tuple[Callable[[SparseFunc], Found], ...] = (
    computed_problems,
    promise_problems,
    assumption_problems,
    row_problems,
)
