"""`expression` and `einsum`: the program of an expression, and its result."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from sparsetir.expressions.assignments import assignments
from sparsetir.expressions.checks import HALVES, check_format, check_like, computed_in
from sparsetir.expressions.compiled import LIKE, MOST_KEPT, Options
from sparsetir.expressions.execution import BoundExpression, ExpressionPlan, bound_expression
from sparsetir.expressions.notation import in_semiring, parse
from sparsetir.expressions.operands import Operand, read
from sparsetir.expressions.program import program
from sparsetir.expressions.storage import Storage, result_storage, storage
from sparsetir.expressions.trees import Statement, accesses
from sparsetir.runtime.refusals import wrong
from sparsetir.sparse_ir.nodes import SparseFunc


def expression(
    text: str, *, dtype: str = "float32", idtype: str = "int32", reduce: str = "sum",
    semiring: str = "plus_times", like: str | None = None, format: object = None,
    **formats: object,
) -> SparseFunc:  # fmt: skip
    """The program of an expression: to print, schedule, lower, tune and build.

    Parameters
    ----------
    text : str
        As of :func:`einsum`, in the form with names.
    dtype : str
        Of all operands and the result.
    idtype : {"int32", "int64"}
        Of coordinates.
    reduce, semiring
        As of :func:`einsum`.
    like : str, optional
        The operand whose pattern the result has; by default it is dense.
    format : str or Format, optional
        Of a sparse result whose pattern the program finds, see :func:`build_assembled`: "csr", ..,
        and "coo", all of whose levels are compressed.
    **formats : str or Format
        By the names of operands: "dense", the default, "csr", "csc", "coo", "ell", "dcsr", "dcsc",
        "csf" and "csf_1_0_2", whose root is dimension 1, "dcsf", whose root is compressed, too.

    Returns
    -------
    SparseFunc
        Its parameters are the values of operands, named as these in lower case, index arrays, the
        result, and sizes. An operand that is read at several indices has parameters for each.

    Raises
    ------
    ValueError, TypeError
        Naming what does not fit, with a caret below the place in the text.

    Examples
    --------
    >>> import sparsetir
    >>> spmm = sparsetir.expression("C[i, k] = A[i, j] * X[j, k]", A="csr")
    >>> kernel = sparsetir.build(spmm)
    """
    who = "expression"
    statement = in_semiring(parse(text, who), reduce, semiring, who)
    names = list(dict.fromkeys(x.name for x in accesses(statement.value)))
    for name in formats:
        if name not in (*names, like):
            raise wrong(
                who, name, f"one of {', '.join(names)}", "a format of no operand", TypeError
            )
    ranks = {x.name: len(x.indices) for x in accesses(statement.value)}
    rank = len(statement.result.indices)
    if like is not None:
        ranks.setdefault(like, rank)
        formats.setdefault(like, "csf" if rank > 2 else "csr")
    operands = {
        name: storage(who, name, formats.get(name, "dense"), n, dtype) for name, n in ranks.items()
    }
    if like is not None and not operands[like].sparse:
        raise wrong(who, "like", "an operand of a sparse format", f"{like!r}, which is dense")
    if like is not None:
        check_like(who, statement, ranks[like])
    acc = computed_in(statement, dtype)
    kind = dtype if dtype in HALVES else acc
    check_format(who, statement, format, like)
    operands[statement.result.name] = (
        Storage(kind, rank) if format is None else result_storage(who, format, rank, kind)
    )
    steps, assembled = assignments(statement, operands, like), format is not None
    return program(steps, operands, acc, idtype, assembled).func


def einsum(
    text: str, *operands: object, reduce: str = "sum", semiring: str = "plus_times",
    like: object = None, format: object = None, out: object = None,
    formats: Mapping[str, object] | None = None, **by_name: object,
) -> Any:  # fmt: skip
    """The result of an expression of sparse and dense tensors.

    Parameters
    ----------
    text : str
        Subscripts as of `numpy.einsum`, "ij,jk->ik"; or an assignment, "C[i, k] = A[i, j] *
        X[j, k] + Y[i, k]", of

        - operands at indices, `A[i, j]`, also at sums of these, `x[2 * i + k - 1]`; what is outside
          of an operand reads as zero. A name without brackets is a number
        - numbers, and indices as values: `i - j`
        - `+ - * / **`, comparisons, `where(a < b, x, y)`, `maximum`, `minimum`, `abs`, `relu`,
          `sigmoid`, `exp`, `log`, `sqrt`, `tanh` and other functions of TIR
        - `sum(j, ...)`, `prod`, `max` and `min`, over one index or several, which may nest

        `+=` adds to the operand of the result's name.
    *operands : arrays or sparse tensors
        In the order in which their names appear: of NumPy or torch, numbers, and all that
        :class:`SparseMatrix` and :class:`SparseTensor` take but an edge_index, which is taken as
        (edge_index, size).
    reduce : {"sum", "prod", "max", "min"}
        For indices that the result lacks.
    semiring : str
        "plus_times"; "min_plus", "max_plus", "max_times" or "or_and" give `*` and the reduction
        another meaning.
    like : str or sparse tensor, optional
        The result has the pattern of this operand, or of another one. By default it is dense.
    format : str or Format, optional
        The result is sparse and stores what the expression visits: "csr", "csc", "dcsr" or "dcsc"
        of two indices, "csf" or "dcsf" of any number, whose last levels or all levels are
        compressed, or "coo". What levels are compressed is how it is made; a tensor of torch has
        the layout of this name, or is in COO.
    out : ndarray, optional
        Where a dense result is written.
    formats : mapping of str to str or Format, optional
        How sparse operands are stored, as of :func:`expression`; by default in compressed levels,
        in the order that suits the expression.
    **by_name : arrays or sparse tensors
        Operands by their names.

    Returns
    -------
    ndarray, Tensor, SparseMatrix or SparseTensor
        Of torch where an operand is; of two indices a sparse one is a SparseMatrix. Its type is the
        one that holds those of all operands, as in NumPy; 16-bit floats are summed in float32, bool
        in int64.

    Raises
    ------
    ValueError, TypeError
        Naming what does not fit, with a caret below the place in the text.

    Notes
    -----
    Each term of a sum is summed over those of its indices that the result lacks: "y[i] = b[i] -
    A[i, j] * x[j]" adds b[i] once. A function of a product is one term, so that "relu(A[i, j] *
    x[j])" sums what relu gives; write relu(sum(j, A[i, j] * x[j])) for the other.

    A sparse factor bounds what is visited: where it stores nothing, a product is zero, whatever the
    other factors are. Reductions other than sums are over what their term stores, and give their
    identity, such as -inf, where that is nothing.

    Kernels are kept by the expression and the types of its operands, sparse operands in the order
    of levels that suits the expression. Gradients of tensors are derived, of any order.
    In a graph of `torch.compile` it is an operator with gradients of the first order, of tensors of
    torch, numbers, and sparse tensors of this library; other operands and sparse results break the
    graph, once.

    Examples
    --------
    >>> import numpy as np, sparsetir
    >>> A = sparsetir.SparseMatrix(([0, 1, 1], [2, 0, 1]), shape=(2, 3))
    >>> sparsetir.einsum("ij,jk->ik", A, np.ones((3, 2), "float32"))
    array([[1., 1.],
           [2., 2.]], dtype=float32)
    """
    torch = sys.modules.get("torch")
    if torch is not None and (
        torch.compiler.is_compiling()
        # Frames that are called from one that is not traced, as of sparse tensors, are traced, too.
        or torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None
    ):
        from sparsetir.expressions.traced import traced, untraced

        call = traced if torch.compiler.is_compiling() else untraced
        return call(
            text, *operands, reduce=reduce, semiring=semiring, like=like, format=format, out=out,
            formats=formats, **by_name,
        )  # fmt: skip
    return evaluated(
        text, *operands, reduce=reduce, semiring=semiring, like=like, format=format, out=out,
        formats=formats, **by_name,
    )  # fmt: skip


def evaluated(
    text: str, *operands: object, reduce: str = "sum", semiring: str = "plus_times",
    like: object = None, format: object = None, out: object = None,
    formats: Mapping[str, object] | None = None, **by_name: object,
) -> Any:  # fmt: skip
    """The result of :func:`einsum`, computed now."""
    planned = _planned("einsum", text, operands, reduce, semiring, like, format, formats, by_name)
    expression, known, like = planned
    return expression.result(known, like, out)


def plan_expression(
    text: str, *operands: object, reduce: str = "sum", semiring: str = "plus_times",
    like: object = None, format: object = None, formats: Mapping[str, object] | None = None,
    **by_name: object,
) -> ExpressionPlan:  # fmt: skip
    """The plan of an expression; the arguments are those of :func:`einsum`."""
    planned = _planned("plan", text, operands, reduce, semiring, like, format, formats, by_name)
    return ExpressionPlan(*planned)


def einsum_program(
    text: str, by_name: Mapping[str, object], operands: Sequence[object] = (), *,
    who: str = "plan", reduce: str = "sum", semiring: str = "plus_times", like: object = None,
    format: object = None, formats: Mapping[str, object] | None = None,
) -> tuple[SparseFunc, dict[str, Any]]:  # fmt: skip
    """The program that :func:`einsum` runs for operands, and its arguments by name.

    operands : those in order of appearance; by_name : the others
    who : how errors begin
    """
    planned = _planned(who, text, operands, reduce, semiring, like, format, formats, by_name)
    expression, known, _ = planned
    return expression.program(known)


def ranks_of(statement: Statement) -> dict[str, int]:
    """The operands of a statement in order of appearance, and how many indices each is at."""
    read = [*accesses(statement.value), *[statement.result] * statement.accumulates]
    return {x.name: len(x.indices) for x in read}


def _planned(
    who: str, text: str, operands: Sequence[object], reduce: str, semiring: str, like: object,
    format: object, formats: Mapping[str, object] | None, by_name: Mapping[str, object],
) -> tuple[BoundExpression, dict[str, Operand], object]:  # fmt: skip
    """An expression for its operands, these by name, and what its result is like."""
    if not isinstance(text, str):
        raise wrong(who, "text", "a str", type(text).__name__, TypeError)
    text, known = operands_of(who, text, operands, by_name)
    mask = None
    if like is not None:
        mask = like if isinstance(like, str) else LIKE
        if mask == LIKE:
            known[LIKE] = read(who, "like", like)
        if mask not in known or known[mask].pattern is None:
            raise wrong(
                who, "like", "a sparse tensor, or the name of a sparse operand", f"{like!r}"
            )
        like = by_name.get(mask, like)
    options = Options(reduce, semiring, mask, format, tuple((formats or {}).items()))
    return bound_expression(who, text, known, options), known, like


def operands_of(
    who: str, text: str, operands: Sequence[object], by_name: Mapping[str, object]
) -> tuple[str, dict[str, Operand]]:
    """The text without dimensions that are broadcast, and its operands by name."""
    values = [read(who, f"operands[{n}]", x) for n, x in enumerate(operands)]
    ranks: tuple[int, ...] = ()
    if "=" not in text:
        if any(1 in x.shape for x in values):
            text, values = _without_ones(text, values)
        ranks = tuple([len(x.shape) for x in values])
    values += [read(who, n, x) for n, x in by_name.items()]
    names = _names(who, text, ranks, len(operands), tuple(by_name))
    return text, dict(zip(names, values, strict=True))


def _without_ones(text: str, operands: list[Operand]) -> tuple[str, list[Operand]]:
    """Subscripts, and operands without dimensions of size 1 that are broadcast, as NumPy has it.

    Those are dimensions of dense operands whose index has another size elsewhere. What does not fit
    stays as it is.
    """
    inputs, arrow, output = text.replace(" ", "").partition("->")
    parts, left = inputs.split(","), list(operands)
    letters = [_letters(part, len(x.shape)) for part, x in zip(parts, operands, strict=False)]
    sizes: dict[str, int] = {}
    for at, x in zip(letters, operands, strict=False):
        for c, d in at:
            sizes[c] = max(sizes.get(c, 0), x.shape[d])
    for n, (at, x) in enumerate(zip(letters, operands, strict=False)):
        ones = {d: c for c, d in at if x.shape[d] == 1 < sizes[c] and parts[n].count(c) == 1}
        if ones and x.pattern is None:
            parts[n] = "".join(c for c in parts[n] if c not in ones.values())
            shape = tuple(size for d, size in enumerate(x.shape) if d not in ones)
            left[n] = x._replace(values=x.values.reshape(shape), shape=shape)
    if ",".join(parts) == inputs:
        return text, operands
    if not arrow:
        once = sorted(c for c in sizes if inputs.count(c) == 1)
        output = "".join(["..." * ("..." in inputs), *once])
    return f"{','.join(parts)}->{output}", left


def _letters(part: str, rank: int) -> list[tuple[str, int]]:
    """The indices of an operand, and their dimensions, but for those of an ellipsis."""
    first, dots, last = part.partition("...")
    if len(first + last) > rank or (not dots and len(part) != rank):
        return []
    places = [*range(len(first)), *range(rank - len(last), rank)]
    return list(zip(first + last, places, strict=True))


@lru_cache(MOST_KEPT)
def _names(
    who: str, text: str, ranks: tuple[int, ...], count: int, more: tuple[str, ...]
) -> tuple[str, ...]:
    """The names of operands: of `count` in order of appearance, and of those given by name."""
    statement = parse(text, who, ranks)
    names = list(ranks_of(statement))
    free = [n for n in names if n not in more]
    if count > len(free):
        got = count + len(more)
        raise TypeError(f"{who}: expected {len(names)} operands ({', '.join(names)}), got {got}")
    for name in more:
        if name not in names:
            raise TypeError(
                f"{who}: argument '{name}': expected one of {', '.join(names)}, which are "
                f"the names of the operands in {text!r}"
            )
    for name in free[count:]:
        raise TypeError(f"{who}: argument '{name}': expected the operand of this name, got none")
    return (*free, *more)
