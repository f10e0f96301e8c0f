"""The functions `expression` and `einsum`: an expression's program, and its result."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from sparsetir.data.sparse_tensor import SparseMatrix, SparseTensor
from sparsetir.expressions.assignments import assignments
from sparsetir.expressions.checks import HALVES, check_format, check_like, check_sums, computed_in
from sparsetir.expressions.compiled import LIKE, MOST_KEPT, MOST_TRIED, Options
from sparsetir.expressions.execution import (
    BoundExpression,
    ExpressionPlan,
    bound_expression,
    keep,
    recalled,
)  # fmt: skip
from sparsetir.expressions.notation import in_semiring, parse, ranks_of
from sparsetir.expressions.operands import DTYPES, Operand, read
from sparsetir.expressions.program import program
from sparsetir.expressions.storage import Storage, result_storage, storage
from sparsetir.expressions.trees import accesses
from sparsetir.runtime.refusals import wrong
from sparsetir.schedules.operators.names import IDTYPES
from sparsetir.sparse_ir.nodes import SparseFunc

# The functions by which torch says whether it traces the caller, once it is imported.
_tracing: tuple[Callable[[], bool], Callable[[], object]] | None = None


def expression(
    text: str, *, dtype: str = "float32", idtype: str = "int32", reduce: str = "sum",
    semiring: str = "plus_times", like: str | None = None, format: object = None,
    **formats: object,
) -> SparseFunc:  # fmt: skip
    """Make the program of an expression, to print, schedule, lower, tune and build.

    Parameters
    ----------
    text : str
        The same as for :func:`einsum`, in the form with names.
    dtype : str
        The type of all operands and the result.
    idtype : {"int32", "int64"}
        The type of coordinates.
    reduce, semiring
        The same as for :func:`einsum`.
    like : str, optional
        The operand whose pattern the result has; by default it is dense.
    format : str or Format, optional
        The format of a sparse result whose pattern the program computes, see
        :func:`build_assembled`: "csr", .., and "coo", all of whose levels are compressed.
    **formats : str or Format
        Formats of operands by name: "dense", the default, "csr", "csc", "coo", "ell", "dcsr",
        "dcsc", "csf" and "csf_1_0_2", whose root is dimension 1, "dcsf", whose root is compressed.

    Returns
    -------
    SparseFunc
        A program whose parameters are the values of operands, with the operands' names in lower
        case, index arrays, the result, and sizes. An operand that is accessed at several indices
        has parameters for each.

    Raises
    ------
    ValueError, TypeError
        For an invalid text or operand; the message marks the position in the text.

    Examples
    --------
    >>> import sparsetir
    >>> spmm = sparsetir.expression("C[i, k] = A[i, j] * X[j, k]", A="csr")
    >>> kernel = sparsetir.build(spmm)
    """
    caller = "expression"
    for name, x, known in (("dtype", dtype, DTYPES), ("idtype", idtype, IDTYPES)):
        if x not in known:
            raise wrong(caller, name, f"one of {', '.join(known)}", f"{x!r}")
    if like is not None and not (isinstance(like, str) and like.isidentifier()):
        raise wrong(caller, "like", "the name of an operand", f"{like!r}")
    statement = in_semiring(parse(text, caller), reduce, semiring, caller)
    check_sums(caller, statement)
    names = list(dict.fromkeys(x.name for x in accesses(statement.value)))
    for name in formats:
        if name not in (*names, like):
            raise wrong(
                caller, name, f"one of {', '.join(names)}", "a format of no operand", TypeError
            )
    ranks = {x.name: len(x.indices) for x in accesses(statement.value)}
    rank = len(statement.result.indices)
    if like is not None:
        ranks.setdefault(like, rank)
        formats.setdefault(like, "csf" if rank > 2 else "csr")
    operands = {
        name: storage(caller, name, formats.get(name, "dense"), n, dtype)
        for name, n in ranks.items()
    }
    if like is not None and not operands[like].sparse:
        raise wrong(caller, "like", "an operand of a sparse format", f"{like!r}, which is dense")
    if like is not None:
        check_like(caller, statement, ranks[like])
    acc = computed_in(statement, dtype)
    kind = dtype if dtype in HALVES else acc
    check_format(caller, statement, format, like)
    operands[statement.result.name] = (
        Storage(kind, rank) if format is None else result_storage(caller, format, rank, kind)
    )
    steps, assembled = assignments(statement, operands, like), format is not None
    return program(steps, operands, acc, idtype, assembled).func


def einsum(
    text: str, *operands: object, reduce: str = "sum", semiring: str = "plus_times",
    like: object = None, format: object = None, out: object = None,
    optimize: bool | str = True, formats: Mapping[str, object] | None = None, **by_name: object,
) -> Any:  # fmt: skip
    """Compute an expression of sparse and dense tensors.

    Parameters
    ----------
    text : str
        Subscripts as in `numpy.einsum`, "ij,jk->ik"; or an assignment, "C[i, k] = A[i, j] *
        X[j, k] + Y[i, k]", of

        - operands at indices, `A[i, j]`, or at sums of these, `x[2 * i + k - 1]`; elements outside
          an operand are zero. A name without brackets is a number
        - numbers, and indices as values: `i - j`
        - `+ - * / **`, comparisons, `where(a < b, x, y)`, `maximum`, `minimum`, `abs`, `relu`,
          `sigmoid`, `exp`, `log`, `sqrt`, `tanh` and other functions of TIR
        - `sum(j, ...)`, `prod`, `max` and `min`, over one index or several, which may nest

        `+=` adds to the operand of the result's name.
    *operands : arrays or sparse tensors
        Operands in the order in which their names appear: arrays of NumPy or torch, numbers, and
        anything that :class:`SparseMatrix` and :class:`SparseTensor` accept, except that an
        edge_index that is a plain tensor needs a size: (edge_index, size).
    reduce : {"sum", "prod", "max", "min"}
        The reduction over indices that the result lacks.
    semiring : str
        "plus_times"; "min_plus", "max_plus", "max_times" or "or_and" redefine `*` and the
        reduction.
    like : str or sparse tensor, optional
        An operand, or another tensor, whose pattern the result has. By default it is dense.
    format : str or Format, optional
        The format of a sparse result that stores all visited elements: "csr", "csc", "dcsr" or
        "dcsc" for two indices, "csf" or "dcsf" for any number, whose last levels or all levels are
        compressed, or "coo". It determines how the result is computed; a tensor of torch has the
        layout of this name, or is in COO.
    out : ndarray or Tensor, optional
        The array to write a dense result to and return: of the result's shape and type, and of
        torch if the result is; not for operands that need gradients.
    optimize : bool or {"greedy", "optimal"}
        How to choose the order of contractions in products of three factors or more, by sizes and
        numbers of stored elements: True tries all orders of up to six factors, "optimal" of any
        number, "greedy" takes the cheapest pair each time; False computes one nest of loops.
    formats : mapping of str to str or Format, optional
        Formats of sparse operands, as for :func:`expression`; by default compressed levels in the
        order that suits the expression.
    **by_name : arrays or sparse tensors
        Operands by their names.

    Returns
    -------
    ndarray, Tensor, SparseMatrix or SparseTensor
        The result, of torch if an operand is; a sparse one with two indices is a SparseMatrix. Its
        type holds those of all operands, as in NumPy; 16-bit floats are summed in float32, bool in
        int64.

    Raises
    ------
    ValueError, TypeError
        For an invalid text or operand; the message marks the position in the text.

    Notes
    -----
    Each term of a sum is summed over those of its indices that the result lacks: "y[i] = b[i] -
    A[i, j] * x[j]" adds b[i] once. A function of a product is one term, so that "relu(A[i, j] *
    x[j])" sums the values of relu; write relu(sum(j, A[i, j] * x[j])) to apply it to the sum.

    A sparse factor bounds the visited elements: where it stores nothing, a product is zero,
    whatever the other factors are. Reductions other than sums cover the stored elements of their
    term, and return their identity, such as -inf, if there are none.

    Kernels are cached by the expression and the types of its operands, sparse operands in the order
    of levels that suits the expression. Gradients of tensors are derived, of any order. In a graph
    of `torch.compile` it is an operator, for torch tensors, numbers, and sparse tensors of this
    library; other operands and sparse results break the graph, once. Most backends, "sparsetir"
    among them, use torch's AOTAutograd, which refuses gradients of gradients: take these outside of
    the compiled function, or with `backend="eager"`.

    Examples
    --------
    >>> import numpy as np, sparsetir
    >>> A = sparsetir.SparseMatrix(([0, 1, 1], [2, 0, 1]), shape=(2, 3))
    >>> sparsetir.einsum("ij,jk->ik", A, np.ones((3, 2), "float32"))
    array([[1., 1.],
           [2., 2.]], dtype=float32)
    """
    global _tracing
    if _tracing is None and (torch := sys.modules.get("torch")) is not None:
        _tracing = torch.compiler.is_compiling, torch._C._dynamo.eval_frame.get_eval_frame_callback
    if _tracing is not None:
        is_compiling, callback = _tracing
        # Dynamo also traces frames that are called from untraced ones, as with sparse tensors.
        if is_compiling() or callback() is not None:
            from sparsetir.expressions.traced import traced, untraced

            call = traced if is_compiling() else untraced
            return call(
                text, *operands, reduce=reduce, semiring=semiring, like=like, format=format,
                out=out, optimize=optimize, formats=formats, **by_name,
            )  # fmt: skip
    # A repeated call reads little besides the arrays: its time is mostly that of the kernel, also
    # where other work has emptied the caches.
    key: list[Any] = [text, reduce, semiring, like, *by_name]
    simple = format is None and formats is None and optimize is True
    simple = simple and (like is None or type(like) is str and like in by_name)
    simple = simple and type(text) is type(reduce) is type(semiring) is str  # else not hashable
    arrays = _arrays(key, (*operands, *by_name.values())) if simple else None
    again = None if arrays is None else recalled(tuple(key))
    if arrays is not None and again is not None:
        if out is not None:
            again.check_out(out, False, False)
        values = again.values_of(*arrays, False, out)
        mask: Any = None if like is None else by_name[str(like)]
        return values if mask is None else mask.holding(values)
    # As `evaluated` does, without handing on keywords, which takes a microsecond.
    options = _options(reduce, semiring, format, formats, optimize)
    expression, known, like = _planned("einsum", text, operands, options, like, by_name)
    result = expression.result(known, like, out)
    if arrays is not None and expression.repeats(known, arrays[0]):
        keep(tuple(key), expression)
    return result


def _arrays(key: list[Any], operands: Iterable[Any]) -> tuple[list[Any], list[bool]] | None:
    """The values of each operand, and whether they are a SparseTensor's; None for operands other
    than these, arrays of NumPy, and numbers.

    key : receives everything that a program depends on
    """
    arrays: list[Any] = []
    steady: list[bool] = []
    for x in operands:
        kind = type(x)
        sparse = kind is SparseMatrix or kind is SparseTensor
        if kind is np.ndarray:
            array, shape = x, x.shape
        elif sparse:
            array, shape = x.values, id(x.pattern)
        elif kind is float or kind is int:
            array, shape = np.asarray(x), kind
        else:
            return None
        arrays.append(array)
        steady.append(sparse)
        key += array.dtype, shape
    return arrays, steady


def evaluated(
    text: str, *operands: object, reduce: str = "sum", semiring: str = "plus_times",
    like: object = None, format: object = None, out: object = None, optimize: bool | str = True,
    formats: Mapping[str, object] | None = None, **by_name: object,
) -> Any:  # fmt: skip
    """Compute :func:`einsum` eagerly."""
    options = _options(reduce, semiring, format, formats, optimize)
    expression, known, like = _planned("einsum", text, operands, options, like, by_name)
    return expression.result(known, like, out)


def plan_expression(
    text: str, *operands: object, reduce: str = "sum", semiring: str = "plus_times",
    like: object = None, format: object = None, optimize: bool | str = True,
    formats: Mapping[str, object] | None = None, **by_name: object,
) -> ExpressionPlan:  # fmt: skip
    """Make the plan of an expression; the arguments are those of :func:`einsum`."""
    options = _options(reduce, semiring, format, formats, optimize)
    return ExpressionPlan(*_planned("plan", text, operands, options, like, by_name))


def einsum_program(
    text: str, by_name: Mapping[str, object], operands: Sequence[object] = (), *,
    caller: str = "plan", reduce: str = "sum", semiring: str = "plus_times", like: object = None,
    format: object = None, optimize: bool | str = True,
    formats: Mapping[str, object] | None = None, at_pattern: bool = False,
) -> tuple[SparseFunc, dict[str, Any]]:  # fmt: skip
    """The program that :func:`einsum` runs for operands, and its arguments by name.

    operands : operands in order of appearance; by_name : the others
    caller : beginning of errors
    at_pattern : whether a sparse result is computed at its pattern, which is computed here; by
        default the program assembles it
    """
    options = _options(reduce, semiring, format, formats, optimize)
    expression, known, _ = _planned(caller, text, operands, options, like, by_name)
    return expression.program(known, at_pattern)


def _options(
    reduce: str, semiring: str, format: object, formats: Mapping[str, object] | None,
    optimize: bool | str,
) -> Options:  # fmt: skip
    if formats and not isinstance(formats, Mapping):
        raise wrong("einsum", "formats", "formats by name", f"{formats!r}", TypeError)
    return Options(reduce, semiring, None, format, (*formats.items(),) if formats else (), optimize)


def _planned(
    caller: str, text: str, operands: Sequence[object], options: Options, like: object,
    by_name: Mapping[str, object],
) -> tuple[BoundExpression, dict[str, Operand], object]:  # fmt: skip
    """The bound expression, its operands by name, and the tensor that the result is like.

    options : without `like`
    """
    for name, x in (("text", text), ("reduce", options.reduce), ("semiring", options.semiring)):
        if not isinstance(x, str):
            raise wrong(caller, name, "a str", type(x).__name__, TypeError)
    if not isinstance(options.format, Hashable):
        raise wrong(caller, "format", "a format or its name", f"{options.format!r}", TypeError)
    optimize = options.optimize
    if not isinstance(optimize, bool | str) or optimize not in MOST_TRIED:
        expected = f"one of {[*MOST_TRIED]}; for a path of your own, a call for each of its steps"
        raise wrong(caller, "optimize", expected, f"{optimize!r}")
    text, known = operands_of(caller, text, operands, by_name)
    if like is not None:
        mask = like if isinstance(like, str) else LIKE
        if mask == LIKE:
            known[LIKE] = read(caller, "like", like)
        if mask not in known or known[mask].pattern is None:
            raise wrong(
                caller, "like", "a sparse tensor, or the name of a sparse operand", f"{like!r}"
            )
        options, like = options._replace(like=mask), by_name.get(mask, like)
    return bound_expression(caller, text, known, options), known, like


def operands_of(
    caller: str, text: str, operands: Sequence[object], by_name: Mapping[str, object]
) -> tuple[str, dict[str, Operand]]:
    """The text without broadcast dimensions, and its operands by name."""
    values = [read(caller, f"operands[{n}]", x) for n, x in enumerate(operands)]
    ranks: tuple[int, ...] = ()
    if "=" not in text:
        for x in values:
            if 1 in x.shape:
                text, values = _without_ones(text, values)
                break
        ranks = tuple([len(x.shape) for x in values])
    for n, x in by_name.items():
        values.append(read(caller, n, x))
    names = _names(caller, text, ranks, len(operands), (*by_name,))
    return text, dict(zip(names, values, strict=True))


def _without_ones(text: str, operands: list[Operand]) -> tuple[str, list[Operand]]:
    """Remove broadcast dimensions of size 1 from subscripts and operands, as in NumPy.

    These are dimensions of dense operands whose index has another size elsewhere. Invalid operands
    are left unchanged.
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
    """The indices of an operand and their dimensions, without those of an ellipsis."""
    first, dots, last = part.partition("...")
    if len(first + last) > rank or (not dots and len(part) != rank):
        return []
    places = [*range(len(first)), *range(rank - len(last), rank)]
    return list(zip(first + last, places, strict=True))


@lru_cache(MOST_KEPT)
def _names(
    caller: str, text: str, ranks: tuple[int, ...], count: int, more: tuple[str, ...]
) -> tuple[str, ...]:
    """The names of operands: of `count` in order of appearance, and of those passed by name."""
    statement = parse(text, caller, ranks)
    names = list(ranks_of(statement))
    free = [n for n in names if n not in more]
    if count > len(free):
        got = count + len(more)
        raise TypeError(f"{caller}: expected {len(names)} operands ({', '.join(names)}), got {got}")
    for name in more:
        if name not in names:
            raise TypeError(
                f"{caller}: argument '{name}': expected one of {', '.join(names)}, which are "
                f"the names of the operands in {text!r}"
            )
    for name in free[count:]:
        raise TypeError(f"{caller}: argument '{name}': expected the operand of this name, got none")
    return (*free, *more)
