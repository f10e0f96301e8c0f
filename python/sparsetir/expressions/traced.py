"""Expressions under torch.compile: an operator of tensors, `sparsetir::einsum`, with gradients.

A sparse tensor is passed as the arrays of its pattern and its values, which are read when the graph
runs. Where the operator is not supported, as for sparse results, the graph breaks.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sparsetir.data.sparse_tensor import SparseTensor
from sparsetir.expressions.checks import sizes_of
from sparsetir.expressions.compiled import MOST_KEPT, Options, typed
from sparsetir.expressions.einsum import evaluated, operands_of
from sparsetir.expressions.operands import Operand, name_of, read
from sparsetir.expressions.unit import torch_dtype
from sparsetir.formats.pattern import Pattern
from sparsetir.ops.operands import Operand as Matrix
from sparsetir.ops.operands import Prepared

REASON = (
    "einsum: expected dense operands of torch, numbers, and sparse ones that are SparseMatrix, "
    "SparseTensor or ops.Operand, and a dense result without `out`; others are computed between "
    "two graphs, which fullgraph=True refuses"
)
NUMBERS = {bool: "bool", int: "int", float: "float"}

untraced: Any = torch.compiler.disable(evaluated, reason=REASON)


def traced(
    text: str, *operands: Any, reduce: str, semiring: str, like: object, format: object, out: Any,
    optimize: bool | str, formats: Mapping[str, object] | None, **by_name: Any,
) -> Any:  # fmt: skip
    """A call of einsum in a graph: the operator, or a graph break."""
    options = {"reduce": reduce, "semiring": semiring, "formats": formats, "optimize": optimize}
    parts = [_parts(x) for x in (*operands, *by_name.values())]
    words = text, reduce, semiring, *(formats or {}).values()
    named = all(isinstance(x, str) for x in words) and isinstance(optimize, (bool, str))
    dense = like is None and format is None and out is None
    plain = any(isinstance(x, Tensor) for x in (*operands, *by_name.values()))
    if not (named and dense and plain) or any(part is None for part in parts):
        return untraced(text, *operands, like=like, format=format, out=out, **options, **by_name)
    kinds, tensors, sizes, numbers = ([x for part in parts for x in part[n]] for n in range(4))
    options["formats"] = dict(formats) if formats else None
    # Operators of torch take no dicts: the text of one, which is read as Python's literals are.
    return einsum_op(repr((text, kinds, [*by_name], options)), tensors, sizes, numbers)


def _parts(x: Any) -> Any:
    """Split an operand into kind, tensors, sizes and numbers; None if it is unsupported.

    The kind, in a list, is the name of a number's type, or a name and the number of tensors.
    """
    x = x.operand if isinstance(x, Prepared) else x
    if type(x) in NUMBERS:
        return [(NUMBERS[type(x)], 0)], [], [], [x]
    if isinstance(x, Tensor):
        return ([("dense", 1)], [x], [], []) if x.layout == torch.strided else None
    if isinstance(x, Matrix):
        arrays = [x.rowptr, x.col] if x.values is None else [x.rowptr, x.col, x.values]
        return [("matrix", len(arrays))], arrays, [x.m, x.n], []
    if not isinstance(x, SparseTensor):
        return None
    known = x.pattern.__dict__  # avoids computing cached properties
    kind = "coords" if "coords" in known else "csr"
    at = known["coords"] if kind == "coords" else (known["indptr"], known["columns"])
    tensors = [torch.as_tensor(a) for a in (x.values, *at)]
    return [(kind, len(tensors))], tensors, [*x.pattern.shape], []


@lru_cache(MOST_KEPT)
def _read(call: str) -> tuple[str, list[tuple[str, int]], list[str], dict[str, Any]]:
    """The text, kinds of operands, names of the last ones, and options of an encoded call."""
    return literal_eval(call)


def _given(
    call: str, tensors: Sequence[Tensor], sizes: Sequence[int], numbers: Sequence[Any], real: bool
) -> tuple[list[Operand], dict[str, Operand]]:
    """Operands in order, and by name; real : whether patterns have data."""
    _, kinds, names, _ = _read(call)
    arrays, lengths, scalars = iter(tensors), iter(sizes), iter(numbers)
    operands: list[Operand] = []
    for kind, count in kinds:
        if kind in NUMBERS.values():
            (make,) = (k for k, name in NUMBERS.items() if name == kind)
            operands.append(read("einsum", "operands", make(next(scalars))))
        elif kind == "dense":
            operands.append(read("einsum", "operands", next(arrays)))
        elif kind == "matrix":
            rowptr, col, shape = next(arrays), next(arrays), (next(lengths), next(lengths))
            values = next(arrays) if count == 3 else None
            matrix = Matrix(rowptr, col, *shape, values)
            dtype = "float32" if values is None else name_of(values)
            fake: Any = Operand(values, shape, dtype, _NOWHERE)
            operands.append(read("einsum", "operands", matrix) if real else fake)
        else:
            values, *at = (next(arrays) for _ in range(count))
            shape = tuple(next(lengths) for _ in range(2 if kind == "csr" else len(at)))
            pattern = _pattern(at, shape, kind == "csr") if real else _NOWHERE
            operands.append(Operand(values, shape, name_of(values), pattern))
    first = len(kinds) - len(names)
    return operands[:first], dict(zip(names, operands[first:], strict=True))


_NOWHERE: Pattern = Pattern.__new__(Pattern)
_patterns: dict[object, Pattern] = {}


def _pattern(at: Sequence[Tensor], shape: tuple[int, ...], rows: bool) -> Pattern:
    """The pattern of these arrays, cached with them, as einsum caches kernels by patterns."""
    key = (rows, shape, *((x.data_ptr(), len(x)) for x in at))
    if key not in _patterns:
        first, *rest = arrays = [x.numpy() for x in at]
        if len(_patterns) >= MOST_KEPT:
            _patterns.pop(next(iter(_patterns)), None)
        _patterns[key] = (
            Pattern.from_csr(first, *rest, shape=shape, check=False)
            if rows
            else Pattern(arrays, shape)
        )
    return _patterns[key]


def _result(
    call: str, tensors: Sequence[Tensor], sizes: Sequence[int], numbers: Sequence[float]
) -> Tensor:
    operands, by_name = _given(call, tensors, sizes, numbers, True)
    text, _, _, options = _read(call)
    arguments: dict[str, Any] = {**options, **by_name}
    return evaluated(text, *operands, **arguments)


@torch.library.custom_op("sparsetir::einsum", mutates_args=())
def einsum_op(
    call: str, tensors: Sequence[Tensor], sizes: Sequence[int], numbers: Sequence[float]
) -> Tensor:
    """Run an encoded call of einsum."""
    return _result(call, [x.detach() for x in tensors], sizes, numbers)


def _recorded() -> Any:
    """A guard that makes torch record autograd inside an operator, where it normally does not."""
    left_out = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        left_out = left_out.remove(getattr(torch._C.DispatchKey, key))
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), left_out)


@torch.library.custom_op("sparsetir::einsum_gradients", mutates_args=())
def gradients_op(
    call: str, grad: Tensor, tensors: Sequence[Tensor], sizes: Sequence[int],
    numbers: Sequence[float], wanted: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    """Compute the gradients for some of the tensors."""
    leaves = [x.detach().requires_grad_(n in wanted) for n, x in enumerate(tensors)]
    with torch.enable_grad(), _recorded():
        result = _result(call, leaves, sizes, numbers)
        asked = [leaves[n] for n in wanted]
        grads = torch.autograd.grad(result, asked, grad, allow_unused=True, materialize_grads=True)
    return [x.clone() for x in grads]


def _fake(
    call: str, tensors: Sequence[Tensor], sizes: Sequence[int], numbers: Sequence[float]
) -> Tensor:
    operands, by_name = _given(call, tensors, sizes, numbers, False)
    text, _, _, options = _read(call)
    text, known = operands_of("einsum", text, operands, by_name)
    statement, dtype, _ = typed("einsum", text, known, Options(**{**options, "formats": ()}))
    sizes_by_index = sizes_of("einsum", statement, {n: x.shape for n, x in known.items()})
    shape = [sizes_by_index[n] for n in statement.result.plain]
    return tensors[0].new_empty(shape, dtype=torch_dtype(dtype))


def _saved(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.call, tensors, ctx.sizes, ctx.numbers = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[1]
    wanted = [n for n, need in enumerate(needed) if need]
    gradients = gradients_op(ctx.call, grad, tensors, ctx.sizes, ctx.numbers, wanted)
    grads: list[Any] = [None] * len(tensors)
    for n, x in zip(wanted, gradients, strict=True):
        grads[n] = x
    return None, grads, *(None if x else [] for x in (ctx.sizes, ctx.numbers))  # in torch's form


def _saved_again(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.call, grad, tensors, ctx.sizes, ctx.numbers, ctx.wanted = inputs
    ctx.save_for_backward(grad, *tensors)


def _backward_again(ctx: Any, grads: Sequence[Tensor]) -> tuple[Any, ...]:
    """Differentiate gradients in eager mode, where einsum has gradients of any order.

    Graphs of AOTAutograd never contain it: torch refuses a second backward through them.
    """
    _, of_grad, of_tensors, *_ = ctx.needs_input_grad
    more, absent = torch.is_grad_enabled(), {"allow_unused": True, "materialize_grads": True}
    with torch.enable_grad():
        # Views, as an operand may also be what `grad` was computed from.
        grad, *tensors = (x.view_as(x) for x in ctx.saved_tensors)
        result = _result(ctx.call, tensors, ctx.sizes, ctx.numbers)
        asked = [tensors[n] for n in ctx.wanted]
        firsts = torch.autograd.grad(result, asked, grad, create_graph=True, **absent)
    needed = [of_grad, *of_tensors]
    inputs = [x for x, need in zip((grad, *tensors), needed, strict=True) if need]
    seconds = iter(torch.autograd.grad(firsts, inputs, grads, create_graph=more, **absent))
    first, *others = (next(seconds) if need else None for need in needed)
    return None, first, others, *(None if x else [] for x in (ctx.sizes, ctx.numbers, ctx.wanted))


einsum_op.register_fake(_fake)
einsum_op.register_autograd(_backward, setup_context=_saved)
gradients_op.register_autograd(_backward_again, setup_context=_saved_again)
gradients_op.register_fake(
    lambda call, grad, tensors, sizes, numbers, wanted: [
        torch.empty_like(tensors[n]) for n in wanted
    ]
)
