"""What matrices do by means of rooms above this one, which the package puts here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _none(matrix: Any, x: Any, plans: dict[Any, Any]) -> Any:
    raise RuntimeError("import sparsetir first")


def _no_matrices(op: str, *matrices: Any, **options: Any) -> Any:
    raise RuntimeError("import sparsetir first")


# Operators of sparse matrices; see :func:`sparsetir.planning.sparse_results.of_matrices`.
of_matrices: Callable[..., Any] = _no_matrices
# `A @ x`; see :func:`sparsetir.planning.products.product`.
product: Callable[[Any, Any, dict[Any, Any]], Any] = _none
