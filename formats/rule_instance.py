"""A rule's description as part of a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from tvm import ir, tirx
from tvm.sym import Analyzer

from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.sparse_ir.nodes import Axis, SparseBuffer, buffer_var, substitute


class RuleInstance:
    """A description with parameters, axes and buffers renamed, and its mask if it has one.

    rule : the rule
    lengths : lengths of axes before by name, for tied axes
    full : whether every slot holds an element, so that no mask is needed
    params : parameters that are added to the program's, the mask's handle last
    axes, buffers : the new ones by their names in the description, without a decoded buffer
    """

    def __init__(
        self, rule: FormatRewriteRule, lengths: Mapping[str, Any], full: bool = False
    ) -> None:
        self.rule, self._lengths = rule, lengths
        desc = rule.new_format_desc
        fresh: dict[Any, Any] = {p: ir.Var(rule.renamed(p.name), p.ty) for p in desc.params}
        self.params = list(fresh.values())
        self.axes: dict[str, Axis] = {}
        for axis in desc.axes:
            self.axes[axis.name] = self._axis(axis, fresh)
        self.buffers: dict[str, SparseBuffer] = {}
        for buf in (b for b in desc.buffers if b.name != rule.decoded):
            self.buffers[buf.name] = self._buffer(
                rule.renamed(buf.name), [self.axes[a.name] for a in buf.axes or ()], buf.dtype,
                fresh.get(buf.handle),
            )  # fmt: skip
        self.mask: SparseBuffer | None = None
        if full or not rule.masked:
            return
        handle = ir.Var(f"mask_{rule.name}", ir.PointerType(ir.PrimType("void")))
        self.params.append(handle)
        after = [self.axes[n] for n in rule.axes_after_rewrite]
        self.mask = self._buffer(f"MASK_{rule.name}", after, "int8", handle)

    def _axis(self, axis: Axis, fresh: dict[Any, Any]) -> Axis:
        def now(value: Any) -> Any:
            return None if value is None else substitute(value, fresh)

        return Axis(
            name=self.rule.renamed(axis.name),
            kind=axis.kind,
            length=self._length(axis, now(axis.length)),
            parent=None if axis.parent is None else self.axes[axis.parent.name],
            nnz=now(axis.nnz),
            nnz_cols=now(axis.nnz_cols),
            indptr=now(axis.indptr),
            indices=now(axis.indices),
            idtype=axis.idtype,
            unique=axis.unique,
        )

    def _length(self, axis: Axis, own: Any) -> Any:
        before, ratio = self.rule.tied.get(axis.name, ("", Fraction(1)))
        if before not in self._lengths:
            return own
        length = self._lengths[before]
        if str(length.ty.dtype) != axis.idtype:
            length = tirx.Cast(axis.idtype, length)
        if ratio == 1:
            return length
        times, each = (tirx.IntImm(axis.idtype, n) for n in ratio.as_integer_ratio())
        return Analyzer().simplify(tirx.floordiv(length * times + (each - 1), each))

    def value(self, name: str, at: list[Any]) -> Any:
        """The value at these coordinates of a buffer by its name in the description."""
        decode = self.rule.decode
        if decode is None or name in self.buffers:
            return tirx.BufferLoad(self.buffers[name].var, at)
        return decode(*(self.buffers[b.name].var for b in self.rule.encoded), *at)

    def is_stored(self, at: list[Any]) -> Any:
        """Whether the slot at these coordinates holds an element; None if there is no mask."""
        if self.mask is None:
            return None
        return tirx.BufferLoad(self.mask.var, at) != tirx.const(0, "int8")

    def where_stored(self, at: list[Any], stmt: Any) -> Any:
        """A statement, executed if the slot at these coordinates holds an element."""
        stored = self.is_stored(at)
        return stmt if stored is None else tirx.IfThenElse(stored, stmt, None)

    @staticmethod
    def _buffer(name: str, axes: list[Axis], dtype: str, handle: Any) -> SparseBuffer:
        var = buffer_var([a.length for a in axes], dtype, name)
        return SparseBuffer(var=var, axes=axes, handle=handle)


def as_coordinates(values: Sequence[Any], axes: Sequence[Axis]) -> list[Any]:
    """The result of a rule's map, as expressions of the types of these axes."""
    return [_as_coordinate(v, a.idtype) for v, a in zip(values, axes, strict=True)]


def _as_coordinate(value: Any, idtype: str) -> Any:
    if isinstance(value, int):
        return tirx.IntImm(idtype, value)
    return value if str(value.ty.dtype) == idtype else tirx.Cast(idtype, value)
