"""Torch operators made of the records of operators: a program, and what it takes.

`sparsetir.ops.NAME` of any operator of :mod:`sparsetir.schedules.operators.registry` that has no
function of its own there. Gradients are derived from the program, any number of times, and
registered with torch as the operator itself is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from torch import Tensor

from sparsetir.ops.checks import check_tensor, check_values
from sparsetir.ops.functional import operand_like
from sparsetir.ops.registry import Operator as Registered
from sparsetir.ops.registry import define, save_inputs, saved
from sparsetir.ops.structure import Structure, call_plan, structure_of
from sparsetir.schedules.operators.gradients import gradient_of
from sparsetir.schedules.operators.operands import Operator
from sparsetir.schedules.operators.registry import OPERATORS


@cache
def function_of(name: str) -> Callable[..., Tensor]:
    """The function of `sparsetir.ops` for a record; what it takes is said in its docstring."""
    record, known = OPERATORS[name], registered(name)

    def run(A: Any, *operands: Tensor, values: Tensor | None = None) -> Tensor:
        sizes = _sizes(record, operands)
        m, n = sizes.get("m"), sizes.get("n")
        shape = None if m is None or n is None else (m, n)
        if values is not None and not record.reads_values:
            raise TypeError(f"{name}: argument 'values': the operator takes none")
        like = operands[0] if operands else None
        rowptr, col, _, n, own = operand_like(name, A, values, shape, like)
        return known(rowptr, col, n, *((own,) if record.reads_values else ()), *operands)

    run.__name__ = run.__qualname__ = name
    run.__doc__ = _doc(record)
    return run


@cache
def registered(name: str) -> Registered:
    """`torch.ops.sparsetir.NAME`, of (rowptr, col, n, values if it reads any, operands)."""
    record = OPERATORS[name]
    values = ["Tensor? a"] if record.reads_values else []
    tensors = ", ".join([*values, *(f"Tensor {operand}" for operand in record.names)])
    return define(
        f"{name}(Tensor rowptr, Tensor col, SymInt n, {tensors}) -> Tensor",
        partial(_run, record), partial(_fake, record), partial(_backward, record), save_inputs,
    )  # fmt: skip


def _run(record: Operator, rowptr: Tensor, col: Tensor, n: int, *given: Any) -> Tensor:
    structure = structure_of(rowptr, col, n, record.name)
    values, operands = (given[0], given[1:]) if record.reads_values else (None, given)
    first = operands[0] if operands else values
    assert first is not None
    feat = _checked_sizes(record, operands, structure).get("k", 1)
    if values is not None:
        check_values(record.name, values, first, structure)
    structure = structure.transposed if record.transposed else structure
    shape = record.shapes(structure.shape, structure.nnz, feat, None)["out"]
    if 0 in shape or not feat:
        return first.new_zeros(shape)
    ones = record.reads_values and values is None
    run, resorted, _ = structure.planned(record.name, feat, first.dtype, ones=ones)
    at = structure.with_columns_in_order if resorted else structure
    arranged = [
        at.arranged(x, 0) if record.dims[name] == "e" else x
        for name, x in zip(record.names, operands, strict=True)
    ]
    if values is not None:
        values = at.arranged(values)
    elif ones and run.needs_values:
        values = at.ones(first.dtype)
    out = call_plan(run, arranged, values)
    return at.restored(out) if record.dims["out"] == "e" else out


def _fake(record: Operator, rowptr: Tensor, col: Tensor, n: int, *given: Any) -> Tensor:
    operands = given[1:] if record.reads_values else given
    sizes = {**_sizes(record, operands), "m": rowptr.shape[0] - 1, "n": n, "e": col.shape[-1]}
    first = next(x for x in (*operands, *given) if x is not None)
    return first.new_empty([sizes[dim] for dim in record.dims["out"]])


def _backward(record: Operator, ctx: Any, grad: Tensor) -> Any:
    rowptr, col, n, *given = saved(ctx)
    names = ("a", *record.names) if record.reads_values else record.names
    there = dict(zip(names, given, strict=True))
    found = []
    for name, wanted in zip(names, ctx.needs_input_grad[3:], strict=True):
        if not wanted:
            found.append(None)
            continue
        back = gradient_of(record.name, name)
        # The one that the operator does not have is the gradient of its result.
        operands = [there.get(own, grad) for own in back.names]
        values = (there["a"],) if back.reads_values else ()
        found.append(registered(back.name)(rowptr, col, n, *values, *operands))
    return None, None, None, *found


def _sizes(record: Operator, operands: Sequence[Any]) -> dict[str, Any]:
    """Sizes by the letters of dimensions, of the first operand that has each."""
    names = record.names
    if len(operands) != len(names):
        raise TypeError(
            f"{record.name}: expected {len(names)} operands ({', '.join(names)}), got "
            f"{len(operands)}"
        )
    sizes: dict[str, Any] = {}
    for name, x in zip(names, operands, strict=True):
        check_tensor(record.name, name, x, None if x is operands[0] else operands[0])
        dims = record.dims[name]
        if x.dim() != len(dims):
            raise ValueError(
                f"{record.name}: argument '{name}': expected {len(dims)} dimensions, got shape "
                f"{tuple(x.shape)}"
            )
        for dim, size in zip(dims, x.shape, strict=True):
            sizes.setdefault(dim, size)
    return sizes


def _checked_sizes(
    record: Operator, operands: Sequence[Tensor], structure: Structure
) -> dict[str, Any]:
    """As :func:`_sizes`; raises ValueError where operands do not fit the caller's pattern."""
    matrix = {"m": structure.m, "n": structure.n, "e": structure.nnz}
    sizes = {**_sizes(record, operands), **matrix}
    for name, x in zip(record.names, operands, strict=True):
        if x.device != structure.device:
            raise ValueError(
                f"{record.name}: argument '{name}': expected to be on {structure.device} as the "
                f"sparse matrix, got {x.device}"
            )
        expected = tuple(sizes[dim] for dim in record.dims[name])
        if tuple(x.shape) != expected:
            raise ValueError(
                f"{record.name}: argument '{name}': expected shape {expected}, got {tuple(x.shape)}"
            )
    return sizes


def _doc(record: Operator) -> str:
    given = "".join(f"{name} : {record.shape_text(name)} Tensor\n" for name in record.names)
    own = "values : (nnz,) Tensor, optional\n    Instead of those of A.\n"
    return f"""{record.title[0].upper()}{record.title[1:]}.

Parameters
----------
A : sparse (m, n) matrix
    Of any kind that :func:`resolve` takes.
{given}{own if record.reads_values else ""}
Returns
-------
{record.shape_text("out")} Tensor
    Differentiable with respect to operands and values, by programs derived from the operator's.
"""
