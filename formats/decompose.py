"""Format decomposition: one computation becomes one per format (SparseTIR, section 3.2.1).

Before::

    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
        with T.init():
            C[i, k] = 0.0
        C[i, k] = C[i, k] + A[i, j] * B[j, k]

After `decompose_format(spmm, [BSR(2), ...])`, for each rule a copy and a computation::

    with T.sp_iter([IO_bsr_2, JO_bsr_2, II_bsr_2, JI_bsr_2], "SSSS", "copy_A_bsr_2") as [...]:
        A_bsr_2[io, jo, ii, ji] = A[io * 2 + ii, jo * 2 + ji]
    with T.sp_iter([I, K], "SS", "spmm_init") as [i, k]:
        C[i, k] = 0.0
    with T.sp_iter([IO_bsr_2, JO_bsr_2, II_bsr_2, JI_bsr_2, K], "SRSRS", "spmm_bsr_2") as [...]:
        if mask_bsr_2[io, jo, ii, ji] != 0:
            C[io * 2 + ii, k] = C[io * 2 + ii, k] + A_bsr_2[io, jo, ii, ji] * B[jo * 2 + ji, k]

The mask distinguishes stored elements from padding, even if the dense operand holds inf or NaN, and
the elements of one rule from those of another. Rules on the output of an earlier rule leave the
copies that fill it unchanged, and copy from there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import product
from typing import Any

from tvm import ir, tirx

from sparsetir.formats.fission import fission
from sparsetir.formats.preprocess import COPY, DECODED, is_copy, statements, without_unused
from sparsetir.formats.queries import are_exactly, fresh_name, sets_all, stored_by, stores, uses
from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.formats.rule_instance import RuleInstance, as_coordinates
from sparsetir.sparse_ir.annotations import RESTORE
from sparsetir.sparse_ir.errors import LoweringError
from sparsetir.sparse_ir.nodes import (
    AttachedAxis,
    Axis,
    FusedAxis,
    PartAxis,
    SparseFunc,
    SparseIteration,
    fresh_definitions,
    nodes_of,
    sparse_iterations,
    substitute,
)
from sparsetir.sparse_ir.separate_init import separate_init
from sparsetir.sparse_ir.tir import as_one
from sparsetir.sparse_ir.traversal import map_expr
from sparsetir.sparse_ir.verify import verify


def decompose_format(
    func: SparseFunc, rules: Sequence[FormatRewriteRule], full: Collection[str] = ()
) -> SparseFunc:
    """Rewrite the iterations over some buffers into iterations over other formats.

    Parameters
    ----------
    func : SparseFunc
        A stage-I function.
    rules : sequence of FormatRewriteRule
        Rules on the same buffers share the work, each computing on the elements in its index arrays
        (and its mask); rules on the output of earlier rules are applied after them.
    full : collection of str
        Names of rules whose formats will have an element in every slot, and so need no mask.

    Returns
    -------
    SparseFunc
        A function with the parameters of `func`, then those of each description renamed by
        :meth:`FormatRewriteRule.renamed`, and, if :attr:`FormatRewriteRule.masked`, a mask
        `mask_<rule>` (int8, over the new axes, 1 where an element is stored).

    Raises
    ------
    ValueError
        For a rule that does not fit the function.
    LoweringError
        For an iteration or an access that cannot be rewritten: one that does not iterate the axes
        before, fused, attached or dependent axes, and, with several rules or with an axis that is
        not unique, any index but the iteration's own coordinates, since the element may belong to
        another rule.

    Notes
    -----
    Copies into a format are iterations `copy_<buffer>_<rule>`, with annotation COPY if the program
    does not write the buffer; buffers that it writes are copied back at the end by
    `restore_<buffer>_<rule>`, while those that it also allocates are replaced entirely. An init
    runs once, before the parts. Where a rule decodes values, its expression takes the place of
    loads, and there is no copy: arguments are encoded (:meth:`ConvertedFormat.values`), and
    parameters that nothing uses any more are left out.

    Reductions are computed part by part, each in the order of its format: they must not depend on
    the order, as sums and maxima do not except for rounding. (SparseTIR, section 3.2.1.)
    """
    if not isinstance(func, SparseFunc):
        raise ValueError(
            "decompose_format: argument 'func': expected a stage-I function, got "
            f"{type(func).__name__}"
        )
    if not rules:
        raise ValueError("decompose_format: argument 'rules': expected at least one rule, got none")
    names = [r.name for r in rules]
    if len(set(names)) != len(names):
        raise ValueError(
            f"decompose_format: argument 'rules': expected different names, got {names}"
        )
    unknown = [n for n in full if n not in names]
    if isinstance(full, str) or unknown:
        raise ValueError(
            f"decompose_format: argument 'full': expected names among {names}, got {full!r}"
        )
    pending = list(rules)
    while pending:
        have = {b.name for b in func.buffers}
        target = tuple(pending[0].buffers_to_rewrite)
        missing = [t for t in target if t not in have]
        if missing:
            raise ValueError(
                f"decompose_format: rule '{pending[0].name}' rewrites '{missing[0]}'; "
                f"the function has the buffers {sorted(have)}"
            )
        together = [r for r in pending if tuple(r.buffers_to_rewrite) == target]
        pending = [r for r in pending if r not in together]
        func = _Decomposition(fission(func, target), together, full).run()
    verify(func)
    return func


class _Decomposition:
    """A set of rules that rewrite the same buffers."""

    def __init__(
        self, func: SparseFunc, rules: list[FormatRewriteRule], full: Collection[str]
    ) -> None:
        self.func = func
        self.targets = {n: func.buffer(n) for n in rules[0].buffers_to_rewrite}
        for rule in rules:
            self._check(rule)
        (target, *_) = self.targets.values()
        lengths = {a.name: a.length for a in target.axes or () if self._has_array(a.length)}
        self.formats = [RuleInstance(r, lengths, r.name in full) for r in rules]
        self.before = list(rules[0].axes_before_rewrite)
        self.parts = statements(func)
        self.added: list[Axis] = []
        self.names = {it.name for it in sparse_iterations(func)}
        # The written buffers, except by copies of earlier rules, and those of them that the program
        # may read before it writes them, or may leave unwritten in part.
        self.written: set[str] = set()
        self.kept: set[str] = set()
        self.local: set[str] = set()  # allocated and written here: replaced entirely
        for name, buf in self.targets.items():
            touching = [p for p in self.parts if not is_copy(p) and uses(p, [buf.var])]
            if any(stores(p, buf.var) for p in touching):
                self.written.add(name)
                if buf.handle is None:
                    self.local.add(name)
                if not sets_all(touching[0], buf):
                    self.kept.add(name)
        for name, fmt in product(self.written, self.formats):
            if name not in fmt.buffers:
                raise LoweringError(
                    f"decompose_format: '{func.name}' writes '{name}', whose values rule "
                    f"'{fmt.rule.name}' decodes from others; it can only be read"
                )

    def _has_array(self, length: Any) -> bool:
        """Whether a length is constant, or that of a dimension of an array that remains."""
        dims = [
            axis.length
            for b in self.func.buffers
            if b.handle is not None and b.name not in self.targets
            for axis in b.axes or ()
            if axis.kind == "dense_fixed"
        ]
        return isinstance(length, tirx.IntImm) or any(length.same_as(d) for d in dims)

    def _check(self, rule: FormatRewriteRule) -> None:
        for name, buf in self.targets.items():
            have = [a.name for a in buf.axes or ()]
            if have != list(rule.axes_before_rewrite):
                raise ValueError(
                    f"decompose_format: rule '{rule.name}': argument 'axes_before_rewrite': "
                    f"expected the axes {have} of buffer '{name}', got "
                    f"{list(rule.axes_before_rewrite)}"
                )
            new = rule.new_format_desc.buffer(name)
            if new.dtype != buf.dtype:
                raise ValueError(
                    f"decompose_format: rule '{rule.name}': buffer '{name}' has dtype {buf.dtype}, "
                    f"the description says {new.dtype}"
                )

    def run(self) -> SparseFunc:
        copies: list[Any] = []
        restores: list[Any] = []
        for fmt in self.formats:
            for name in self.targets:
                if name in self.local or name not in fmt.buffers:
                    continue
                if name not in self.written or name in self.kept:
                    copies.append(self._move(fmt, name, back=False))
                if name in self.written:
                    restores.append(self._move(fmt, name, back=True))
        # The copies that fill the targets come before those that read them.
        filled = [p for p in self.parts if is_copy(p)]
        rest = [new for p in self.parts if not is_copy(p) for new in self._statement(p)]
        body = [*filled, *copies, *rest, *restores]
        axes = [a for f in self.formats for a in f.axes.values()]
        buffers = [b for b in self.func.buffers if b.name not in self.local]
        for fmt in self.formats:
            buffers += [*fmt.buffers.values(), *([fmt.mask] if fmt.mask else [])]
        func = self.func.replace(
            params=[*self.func.params, *(p for f in self.formats for p in f.params)],
            axes=[*self.func.axes, *axes, *self.added],
            buffers=buffers,
            body=as_one(body),
        )
        if all(f.rule.decode is None for f in self.formats):
            return func
        return without_unused(func, body, func.name).with_attr(DECODED, 1)

    def _move(self, fmt: RuleInstance, name: str, back: bool) -> SparseIteration:
        """The iteration that copies a buffer into a format, or back."""
        axes = [fmt.axes[n] for n in fmt.rule.axes_after_rewrite]
        new_vars = [tirx.Var(a.name.lower(), a.idtype) for a in axes]
        new, old = fmt.buffers[name], self.targets[name]
        old_index = as_coordinates(fmt.rule.to_old(new_vars), old.axes or ())
        if back:
            copy: Any = tirx.BufferStore(old.var, tirx.BufferLoad(new.var, new_vars), old_index)
            copy = fmt.where_stored(new_vars, copy)
        else:
            copy = tirx.BufferStore(new.var, tirx.BufferLoad(old.var, old_index), new_vars)
        return SparseIteration(
            span=None,
            axes=axes,
            kinds="S" * len(axes),
            name=f"{'restore' if back else 'copy'}_{name}_{fmt.rule.name}",
            vars=new_vars,
            init=None,
            body=copy,
            annotations={RESTORE: 1} if back else {} if name in self.written else {COPY: 1},
        )

    def _statement(self, stmt: Any) -> list[Any]:
        targets = [b.var for b in self.targets.values()]
        if not uses(stmt, targets):
            return [stmt]
        if not isinstance(stmt, SparseIteration):
            raise LoweringError(
                f"decompose_format: '{self.func.name}' uses {sorted(self.targets)} inside a "
                f"{type(stmt).__name__}; only sparse iterations are decomposed"
            )
        own_init = stmt.init is not None and any(stores(stmt.init, v) for v in targets)
        if own_init and any(v not in targets for v in stored_by(stmt.init)):
            raise LoweringError(
                f"decompose_format: the init of iteration '{stmt.name}' writes rewritten buffers "
                "and others; give each an iteration of its own"
            )
        parts = [self._compute(f, stmt, keep_init=own_init) for f in self.formats]
        if stmt.init is None or own_init:
            return parts
        return [*map(self._init, separate_init(stmt, self.func, set())), *parts]

    def _init(self, it: SparseIteration) -> SparseIteration:
        """An iteration of an init, with its axes added to the function."""
        taken = {a.name for a in [*self.func.axes, *self.added]}
        taken |= {a.name for f in self.formats for a in f.axes.values()}
        known = {a.name for a in self.func.axes}
        axes: list[Any] = []
        for axis in it.axes:
            if isinstance(axis, Axis) and axis.name not in known:  # made for this init
                fields = ("kind", "length", "idtype")
                kept = {f: getattr(axis, f) for f in fields}
                axis = Axis(name=fresh_name(axis.name, taken), **kept)
                self.added.append(axis)
            axes.append(axis)
        return SparseIteration(
            span=it.span, axes=axes, kinds=it.kinds, name=fresh_name(it.name, self.names),
            vars=it.vars, init=None, body=it.body, annotations=it.annotations,
        )  # fmt: skip

    def _compute(self, fmt: RuleInstance, it: SparseIteration, keep_init: bool) -> SparseIteration:
        """The iteration on one format."""
        rule = fmt.rule
        self._check_iteration(it, rule)
        var_of = {a.name: v for a, v, _ in it.axis_of()}
        kind_of = {a.name: k for a, _, k in it.axis_of()}
        source = {new: old for old in self.before for new in rule.axis_map[old]}
        axes = [fmt.axes[n] for n in rule.axes_after_rewrite]
        taken = {v.name for n, v in var_of.items() if n not in self.before}
        new_vars = [
            tirx.Var(fresh_name(n.lower(), taken), a.idtype)
            for n, a in zip(rule.axes_after_rewrite, axes, strict=True)
        ]
        old = rule.to_old(new_vars)
        # A spatial coordinate may be computed from several new ones, as in formats by diagonals.
        spatial = [e for e, n in zip(old, self.before, strict=True) if kind_of[n] == "S"]
        kinds = "".join(
            "S" if any(uses(e, [v]) for e in spatial) else kind_of[source[n]]
            for n, v in zip(rule.axes_after_rewrite, new_vars, strict=True)
        )
        entries: list[tuple[Any, Any, str]] = []
        placed = False
        for node, (axis, var, kind) in zip(it.axes, it.axis_of(), strict=True):
            if axis.name not in self.before:
                entries.append((node, var, kind))
            elif not placed:
                entries.extend(zip(axes, new_vars, kinds, strict=True))
                placed = True
        old_vars = [var_of[n] for n in self.before]
        old_axes = [self.func.axis(n) for n in self.before]
        coords = dict(zip(old_vars, as_coordinates(old, old_axes), strict=True))

        def index(indices: list[Any]) -> list[Any]:
            if are_exactly(indices, old_vars):
                return list(new_vars)
            return as_coordinates(rule.to_new(indices), axes)

        def load(node: Any) -> Any:
            name = self._target(node.source)
            if name is None:
                return node
            at = index(list(node.indices))
            element = fmt.value(name, at)
            stored = fmt.is_stored(at)
            if stored is None or are_exactly(node.indices, old_vars):
                return element
            return tirx.if_then_else(stored, element, tirx.const(0, str(element.ty.dtype)))

        def store(node: Any) -> Any:
            name = self._target(node.buffer)
            if name is None:
                return node
            where = index(list(node.indices))
            return tirx.BufferStore(fmt.buffers[name].var, node.value, where, node.span)

        def rewrite(stmt: Any) -> Any:
            moved = map_expr(stmt, [(ir.TensorLoad, load), (tirx.BufferStore, store)])
            return substitute(moved, coords)

        renamed = {v: tirx.Var(v.name, v.ty.dtype) for a, v, _ in entries if v not in new_vars}
        renamed |= fresh_definitions(it.init, it.body)
        body = fmt.where_stored(new_vars, rewrite(it.body))
        init = rewrite(it.init) if keep_init and it.init is not None else None
        return SparseIteration(
            span=it.span,
            axes=[a for a, _, _ in entries],
            kinds="".join(k for _, _, k in entries),
            name=f"{it.name}_{rule.name}",
            vars=[renamed.get(v, v) for _, v, _ in entries],
            init=None if init is None else substitute(init, renamed),
            body=substitute(body, renamed),
            annotations=it.annotations,
        )

    def _check_iteration(self, it: SparseIteration, rule: FormatRewriteRule) -> None:
        """Refuse iterations that cannot be rewritten."""
        place = f"decompose_format: iteration '{it.name}' of '{self.func.name}'"
        have = [a.name for a, _, _ in it.axis_of()]
        missing = [n for n in self.before if n not in have]
        if missing:
            raise LoweringError(
                f"{place} does not iterate '{missing[0]}'; rule '{rule.name}' needs plain "
                f"iterations over {self.before}"
            )
        var_of = {a.name: v for a, v, _ in it.axis_of()}
        elsewhere = self._elsewhere(it, [var_of[n] for n in self.before])
        if elsewhere is not None:
            at, rules = ", ".join(map(str, elsewhere)), [f.rule.name for f in self.formats]
            access = f"{place} accesses {sorted(self.targets)} at [{at}]"
            if len(rules) > 1:
                raise LoweringError(
                    f"{access}, which may be the element of another of the rules {rules}; "
                    "decompose with one rule"
                )
            if rule.decode is not None:
                raise LoweringError(
                    f"{access}; rule '{rule.name}' decodes values only at the coordinates that an "
                    "iteration visits"
                )
            repeated = [n for n in rule.axes_after_rewrite if not rule.axis(n).unique]
            if repeated:
                raise LoweringError(
                    f"{access}, which cannot be looked up: axis '{repeated[0]}' of rule "
                    f"'{rule.name}' stores a coordinate more than once"
                )
        for node in it.axes:
            if isinstance(node, PartAxis):
                raise LoweringError(
                    f"{place} visits parts of '{node.name}'; decompose before cutting into parts"
                )
            if isinstance(node, FusedAxis):
                raise LoweringError(f"{place} has fused axes; decompose before fusing")
            within = [node, *(node.merged if isinstance(node, Axis) else [])]
            above = [x.to if isinstance(x, AttachedAxis) else x.parent for x in within]
            over = next((a for a in above if a is not None and a.name in self.before), None)
            if node.name in self.before and isinstance(node, AttachedAxis):
                raise LoweringError(
                    f"{place}: axis '{node.name}' is attached and cannot be rewritten"
                )
            if over is not None and node.name not in self.before:
                raise LoweringError(
                    f"{place}: axis '{node.name}' depends on '{over.name}', which rule "
                    f"'{rule.name}' replaces; rewrite a buffer over both"
                )

    def _elsewhere(self, it: SparseIteration, coordinates: list[Any]) -> Any:
        """Indices of an access to a target other than the iteration's own coordinates, or None."""
        for node in nodes_of((ir.TensorLoad, tirx.BufferStore), it.init, it.body):
            buf = node.source if isinstance(node, ir.TensorLoad) else node.buffer
            if self._target(buf) is not None and not are_exactly(node.indices, coordinates):
                return list(node.indices)
        return None

    def _target(self, var: Any) -> str | None:
        return next((n for n, b in self.targets.items() if b.var.same_as(var)), None)
