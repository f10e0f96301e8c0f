"""Operations of matrices that higher packages define and register here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _none(*_: object, **__: object) -> object:
    raise RuntimeError("import sparsetir first")


# Operators of sparse matrices; see :func:`sparsetir.planning.sparse_results.sparse_operation`.
sparse_operation: Callable[..., Any] = _none
# Plans of expressions; see :func:`sparsetir.expressions.einsum.plan_expression`.
expression: Callable[..., Any] = _none
# `A @ x`; see :func:`sparsetir.planning.plan.product`.
product: Callable[[object, object, dict[object, object]], Any] = _none
