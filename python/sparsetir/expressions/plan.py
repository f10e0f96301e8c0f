"""The plan of an expression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsetir.expressions.execution import BoundExpression
from sparsetir.expressions.operands import Operand, name_of
from sparsetir.runtime.refusals import wrong
from sparsetir.sparse_ir.nodes import SparseFunc


class ExpressionPlan:
    """An expression of operands whose patterns and shapes are kept, as `sparsetir.plan` gives it.

    Call it with operands in place of those it was planned with, by name: arrays of the same shape
    and type; of a sparse operand its values, (nnz,), in the order of :attr:`SparseMatrix.values`.

    Parameters
    ----------
    expression : BoundExpression
        The expression for their patterns and shapes.
    operands : mapping of str to Operand
        What it was planned with, by name.
    like : object
        What was given for the result's pattern.

    Attributes
    ----------
    programs : list of SparseFunc
        What is computed, in order.
    """

    def __init__(
        self, expression: BoundExpression, operands: Mapping[str, Operand], like: object
    ) -> None:
        self._expression, self._operands, self._like = expression, dict(operands), like
        self.programs: list[SparseFunc] = [u.unit.func for u in expression.bound(operands)]

    def __call__(self, *, out: Any = None, **values: Any) -> Any:
        """The result.

        Parameters
        ----------
        out : ndarray, optional
            Where a dense result is written.
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
        return self._expression.result(operands, self._like, out)

    def _replaced(self, name: str, x: Any) -> Operand:
        """An operand with other values."""
        old = self._operands.get(name)
        if old is None:
            names = ", ".join(self._operands)
            raise TypeError(f"plan: argument '{name}': expected one of {names}")
        shape = tuple(getattr(x, "shape", ()))
        expected = old.shape if old.pattern is None else (old.pattern.nnz,)
        if shape != expected or (shape and name_of(x) != old.dtype):
            got = f"{shape} {getattr(x, 'dtype', type(x).__name__)}"
            raise wrong("plan", name, f"{expected} {old.dtype}", got)
        return old._replace(values=x if shape else np.asarray(x, old.dtype), steady=False)

    def __repr__(self) -> str:
        return f"<sparsetir.ExpressionPlan {self._expression.compiled.statement.text}>"
