"""Evaluation of expressions for operands of known types, patterns and shapes, and plans."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from sparsetir.data.sources import Stored
from sparsetir.data.sparse_tensor import SparseMatrix, SparseTensor
from sparsetir.expressions.assembling import Assembling, arguments_of
from sparsetir.expressions.checks import sizes_of
from sparsetir.expressions.compiled import LIKE, MOST_KEPT, MOST_TRIED, Compiled, Options, compiled
from sparsetir.expressions.contraction import contracted
from sparsetir.expressions.invariants import hoisted
from sparsetir.expressions.levels import LevelArrays, level_arrays
from sparsetir.expressions.operands import Operand, name_of, patterns_of, read
from sparsetir.expressions.storage import csf_levels
from sparsetir.expressions.unit import Bound, Unit
from sparsetir.formats.pattern import Pattern
from sparsetir.runtime.arrays import is_torch, to_numpy
from sparsetir.runtime.refusals import wrong
from sparsetir.sparse_ir.nodes import SparseFunc


class BoundExpression:
    """An expression for operands of given types, patterns and shapes.

    compiled : the expression
    """

    def __init__(self, compiled: Compiled, operands: Mapping[str, Operand]) -> None:
        self.compiled = compiled
        shapes = {n: x.shape for n, x in operands.items()}
        self.sizes = sizes_of(compiled.caller, compiled.statement, shapes)
        self.keys: list[Hashable] = []  # in the cache
        self.held: object = None  # weak references that drop it when a pattern is freed
        self._bound: dict[bool, list[Bound]] = {}
        self._names = [*operands]
        # The program of the expression, with the place of each input's operand and its levels.
        self._whole: tuple[Bound, list[tuple[int, LevelArrays | None]]] | None = None
        if compiled.like is not None:
            expected = tuple(self.sizes[n] for n in compiled.statement.result.plain)
            if shapes[compiled.like] != expected:
                raise wrong(compiled.caller, "like", f"shape {expected}", shapes[compiled.like])

    @cached_property
    def _assembling(self) -> Assembling:
        return Assembling(self.compiled, self.sizes)

    def bound(self, operands: Mapping[str, Operand], apart: bool = False) -> list[Bound]:
        """One program for the expression; if `apart`, one per step, to derive gradients from."""
        if apart not in self._bound:
            compiled, patterns = self.compiled, patterns_of(operands)
            steady = all(x.steady for x in operands.values() if x.pattern is not None)
            known = self.sizes, patterns, compiled.idtype, steady and not apart
            self._bound[apart] = [Bound(u, *known) for u in self._units(patterns, apart)]
        return self._bound[apart]

    def _units(self, patterns: Mapping[str, Pattern], apart: bool) -> list[Unit]:
        compiled = self.compiled
        stored, optimize = {n: p.nnz for n, p in patterns.items()}, compiled.options.optimize
        steps = tuple(compiled.steps)
        if optimize is not False and compiled.may_be_split:
            steps = hoisted(steps, self.sizes, stored)
            steps = contracted(steps, self.sizes, stored, MOST_TRIED[optimize])
        return compiled.units(steps, compiled.fixed(self.sizes), apart)

    def programs(self, operands: Mapping[str, Operand]) -> list[SparseFunc]:
        """The programs in the order of their computation."""
        if self.compiled.open_form is not None:
            return [(self.compiled.together or self.compiled.whole).func]
        return [bound.unit.func for bound in self.bound(operands)]

    def program(
        self, operands: Mapping[str, Operand], at_pattern: bool
    ) -> tuple[SparseFunc, dict[str, Any]]:
        """The uncompiled program of the expression, and its arguments by name.

        at_pattern : whether a sparse result is computed at its pattern, which is computed here; by
            default the program assembles it

        Outputs that are only written are not among the arguments.
        """
        this, sparse = self.compiled, self.compiled.open_form is not None
        if sparse:
            unit = this.together or this.whole
        else:
            (unit,) = self._units(patterns_of(operands), False)
        params = [str(p.name) for p in unit.func.params]
        arguments = arguments_of(unit, params, self.sizes, operands, this.idtype)
        if this.statement.accumulates:
            arguments[unit.result] = operands[this.result_name].values
        if not (sparse and at_pattern):
            return unit.func, arguments
        func, pattern = Assembling(this, self.sizes).at_pattern(unit.func, operands)
        return func, arguments | pattern

    def result(
        self, operands: Mapping[str, Operand], like: object = None, out: Any = None,
        assembling: Assembling | None = None,
    ) -> Any:  # fmt: skip
        """Compute the result for operands of these types.

        like : the caller's tensor for the pattern, or a layout of torch
        assembling : the object that computes a sparse result, if known
        """
        tensors = [x.values for x in operands.values() if type(x.values) is not np.ndarray]
        graded = False
        if tensors:
            import torch

            graded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        this = self.compiled
        if out is not None:
            self.check_out(out, bool(tensors), graded)
        if this.open_form is None:
            values = self._graded(operands) if graded else self._plain(operands, bool(tensors), out)
            if this.like is None:
                return values
            like = _layout(this.options, values) if like is None else like
            return _sparse(operands[this.like], values, like)
        call = self._assembling.assembled if assembling is None else assembling
        matrix = call(operands)
        if not tensors:
            return matrix
        at = Operand(None, matrix.shape, this.dtype, matrix.pattern)
        from sparsetir.ops.operands import tensor_of

        values = tensor_of(matrix.values)
        if graded:
            values = self._known(values, at, operands)
        return _sparse(at, values, _layout(this.options, values))

    def repeats(self, operands: Mapping[str, Operand], arrays: Sequence[Any]) -> bool:
        """Whether :meth:`values_of` gives the result's values for such arrays, as they are."""
        this, same = self.compiled, zip(operands.values(), arrays, strict=True)
        at_mask = this.like == this.options.like and this.open_form is None
        return at_mask and all(x.constant or x.values is array for x, array in same)

    def _known(self, values: Any, at: Operand, operands: Mapping[str, Operand]) -> Any:
        """The computed values of a sparse result, with gradients: those at its pattern."""
        from sparsetir.expressions.autograd import Known

        this = self.compiled
        names = [n for n, x in operands.items() if is_torch(x.values)]
        tensors = [operands[n].values for n in names]
        # Without these tensors, which torch keeps while gradients may be needed.
        others = {n: x._replace(values=None) if n in names else x for n, x in operands.items()}

        def function(tensors: list[Any]) -> Any:
            pairs = zip(names, tensors, strict=True)
            known = {**others, **{n: others[n]._replace(values=x) for n, x in pairs}, LIKE: at}
            options = this.options._replace(format=None, like=LIKE, computed=True)
            expression = bound_expression(this.caller, this.statement.text, known, options)
            return expression._graded(known, known=True)

        return Known.apply(values, function, *tensors)

    def _plain(self, operands: Mapping[str, Operand], torch: bool, out: Any) -> Any:
        """Compute the values of the result by one program."""
        if self._whole is None:
            (bound,) = self.bound(operands)
            self._whole = bound, [(self._names.index(n), levels) for n, levels in bound.sources]
        each = operands.values()
        return self.values_of([x.values for x in each], [x.steady for x in each], torch, out)

    def values_of(
        self, arrays: Sequence[Any], steady: Sequence[bool], torch: bool, out: Any
    ) -> Any:  # fmt: skip
        """Compute the values of the result again.

        arrays, steady : the values of each operand, and whether they are a SparseTensor's
        """
        assert self._whole is not None
        bound, sources = self._whole
        values, unchanged = [], []
        for n, levels in sources:
            x = arrays[n]
            if levels is not None:
                x = levels.values(x, steady[n])
            unchanged.append(steady[n] or levels is not None)
            if type(x) is not np.ndarray:
                x = (x.detach() if x.requires_grad else x).contiguous()
            elif not x.flags.c_contiguous:
                x = np.ascontiguousarray(x)
            values.append(x)
        direct = out is not None and _is_disjoint(out, values)
        result: Any = out if direct else bound.empty(torch)
        if self.compiled.statement.accumulates:
            result[...] = arrays[self._names.index(self.compiled.result_name)]
        result = bound.natural(bound(values, result, unchanged))
        if out is None or direct:
            return result
        out[...] = result
        return out

    def check_out(self, out: Any, torch: bool, graded: bool) -> None:
        """Raise for an array that the result cannot be written to."""
        this = self.compiled
        if graded or this.like is not None or this.open_form is not None:
            expected = "None for sparse results and operands that need gradients"
            raise wrong(this.caller, "out", expected, "an array")
        shape = tuple(self.sizes[n] for n in this.statement.result.plain)
        fits = is_torch(out) if torch else isinstance(out, np.ndarray) and out.flags.writeable
        if not fits or tuple(out.shape) != shape or name_of(out) != this.dtype:
            kind = "tensor of torch" if torch else "ndarray to write to"
            what = f"{getattr(out, 'shape', '')} {getattr(out, 'dtype', type(out).__name__)}"
            what += ", read-only" if isinstance(out, np.ndarray) and not out.flags.writeable else ""
            raise wrong(this.caller, "out", f"a {kind}, {shape} {this.dtype}", what.strip())

    def _graded(self, operands: Mapping[str, Operand], known: bool = False) -> Any:
        """Compute the result step by step, for tensors that need gradients.

        known : whether the result is known, so that only its gradients are needed
        """
        import torch

        from sparsetir.expressions.autograd import run

        values = {n: torch.as_tensor(x.values) for n, x in operands.items() if n != LIKE}
        patterns = patterns_of(operands)
        result: Any = None
        steps = self.bound(operands, apart=True)
        for bound in steps:
            read = [
                values[n] if levels is None else levels.values(values[n])
                for n, levels in bound.sources
            ]
            skipped = known and bound is steps[-1]
            read = [x.contiguous() for x in read]
            result = bound.natural(run(bound, patterns, read, skipped))
            values[bound.unit.values[bound.unit.result][0]] = result
        if self.compiled.statement.accumulates:
            result = result + torch.as_tensor(operands[self.compiled.result_name].values)
        return result


def _is_disjoint(out: Any, values: Iterable[Any]) -> bool:
    """Whether a kernel can write to an array: contiguous, and without memory of operands."""
    host = to_numpy(out)
    apart = not any(np.may_share_memory(host, to_numpy(x)) for x in values)
    return apart and host.flags.c_contiguous and host.dtype.isnative


def _same(new: Pattern | None, old: Pattern | None) -> bool:
    """Whether two operands of the same shape are both dense, or store the same elements."""
    if new is old or new is None or old is None:
        return new is old
    pairs = zip(new.coords, old.coords, strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


def _layout(options: Options, values: Any) -> Any:
    """The torch layout of a sparse result by its format; None without one, and for NumPy."""
    if options.format is None or not is_torch(values):
        return None
    import torch

    name = getattr(options.format, "name", options.format)
    return getattr(torch, f"sparse_{name}" if name in ("csr", "csc") else "sparse_coo")


def _sparse(mask: Operand, values: Any, like: object) -> Any:
    """Wrap the values of a sparse result with the pattern of an operand."""
    pattern = mask.pattern
    assert pattern is not None
    host: Any = values
    if isinstance(like, SparseTensor) and not is_torch(values):
        return like.holding(values)
    if not is_torch(values):
        kind = SparseMatrix if pattern.order == 2 else SparseTensor
        return kind.of_stored(Stored(pattern, host, None))
    import torch as loaded

    from sparsetir.ops.sparse_results import compressed, coordinates

    torch: Any = loaded
    layout: Any = like
    if not isinstance(like, torch.layout):
        layout = getattr(like, "layout", torch.sparse_csr)
    if pattern.order != 2 or layout == torch.sparse_coo:
        at = torch.from_numpy(np.stack(pattern.coords).astype(np.int64))
        return coordinates(at, values, pattern.shape)
    idtype = pattern.idtype
    if layout == torch.sparse_csc:
        stored = level_arrays(pattern, csf_levels(2), (1, 0), idtype)
        arrays, values = stored.arrays[1], stored.values(values)
    else:
        layout, arrays = torch.sparse_csr, (pattern.indptr, pattern.columns)
    index = [torch.from_numpy(np.ascontiguousarray(x, idtype)) for x in arrays]
    return compressed(layout, index, values, pattern.shape)


_kept: dict[Hashable, BoundExpression] = {}
recalled = _kept.get  # the bound expression of a key, if any


def bound_expression(
    caller: str, text: str, operands: Mapping[str, Operand], options: Options
) -> BoundExpression:
    """The expression bound to these operands, cached while their patterns live."""
    key = text, options, *[
        (n, x.dtype, x.shape, x.constant, id(x.pattern)) for n, x in operands.items()
    ]  # fmt: skip
    kept = _kept.get(key)
    if kept is None:
        kept = BoundExpression(compiled(caller, text, operands, options), operands)
        forget = partial(_forget, kept.keys)
        kept.held = [weakref.ref(p, forget) for p in patterns_of(operands).values()]
        keep(key, kept)
    return kept


def keep(key: Hashable, expression: BoundExpression) -> None:
    """Cache a bound expression by one more key, with ids of its operands' patterns."""
    if len(_kept) >= MOST_KEPT:
        _kept.pop(next(iter(_kept)), None)
    _kept[key] = expression
    expression.keys.append(key)


def _forget(keys: Iterable[Hashable], _: object) -> None:
    for key in keys:
        _kept.pop(key, None)


class ExpressionPlan:
    """An expression planned for operands' patterns and shapes, the result of `sparsetir.plan`.

    Call it with operands, by name, that replace those it was planned with: arrays of the same shape
    and type; for a sparse operand its values, (nnz,), in the order of :attr:`SparseMatrix.values`,
    or a sparse tensor with the same pattern. The pattern of a sparse result is computed once.

    Parameters
    ----------
    expression : BoundExpression
        The expression for their patterns and shapes.
    operands : mapping of str to Operand
        The operands it was planned with, by name.
    like : object
        The caller's tensor for the result's pattern.

    Attributes
    ----------
    programs : list of SparseFunc
        The programs in the order of their computation.
    """

    def __init__(
        self, expression: BoundExpression, operands: Mapping[str, Operand], like: object
    ) -> None:
        self._expression, self._operands, self._like = expression, dict(operands), like
        sparse, sizes = expression.compiled.open_form is not None, expression.sizes
        self._assembling = Assembling(expression.compiled, sizes) if sparse else None
        self.programs: list[SparseFunc] = expression.programs(operands)

    def __call__(self, *, out: Any = None, **values: Any) -> Any:
        """Compute the result.

        Parameters
        ----------
        out : ndarray, optional
            The array that a dense result is written to.
        **values : arrays
            Operands by name; by default those of the plan.

        Returns
        -------
        ndarray, Tensor, SparseMatrix or SparseTensor
        """
        operands = self._operands
        if values:
            operands = dict(operands)
            for name, x in values.items():
                operands[name] = self._replaced(name, x)
        return self._expression.result(operands, self._like, out, self._assembling)

    def _replaced(self, name: str, x: Any) -> Operand:
        """An operand with other values."""
        old = self._operands.get(name)
        if old is None:
            names = ", ".join(self._operands)
            raise TypeError(f"plan: argument '{name}': expected one of {names}")
        new, pattern = read("plan", name, x), old.pattern
        if pattern is not None and new.pattern is None and new.shape == (pattern.nnz,):
            new = Operand(new.values, old.shape, new.dtype, pattern)
        if not old.shape and new.constant and np.can_cast(new.dtype, old.values.dtype, "same_kind"):
            return old._replace(values=new.values.astype(old.values.dtype))
        if (new.shape, new.dtype) != (old.shape, old.dtype) or not _same(new.pattern, pattern):
            expected = f"{old.shape} {old.dtype}"
            if pattern is not None:
                expected = f"{(pattern.nnz,)} {old.dtype}, or a tensor with the plan's pattern"
            raise wrong("plan", name, expected, f"{new.shape} {new.dtype}")
        return Operand(new.values, old.shape, old.dtype, pattern, old.constant, new.steady)

    def __repr__(self) -> str:
        return f"<sparsetir.ExpressionPlan {self._expression.compiled.statement.text}>"
