"""Torch operators generated from the records of operators.

They are `sparsetir.ops.NAME` for each operator of :mod:`sparsetir.schedules.operators.registry`
that has no function of its own there. Gradients are derived from its program, any number of times,
and registered with torch like the operator itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import make_dataclass
from functools import cache, partial
from typing import ClassVar

from torch import Tensor

from sparsetir.ops.products import operand_like
from sparsetir.ops.registry import Gradients, Operation, Operator
from sparsetir.ops.structure import Structure, structure_of
from sparsetir.ops.tensors import check_tensor, check_values
from sparsetir.runtime.refusals import wrong
from sparsetir.schedules.operators.gradients import gradient_of
from sparsetir.schedules.operators.operands import Operator as Record
from sparsetir.schedules.operators.registry import OPERATORS


@cache
def function_of(name: str) -> Callable[..., Tensor]:
    """The function of `sparsetir.ops` for a record, with a generated docstring."""
    record, operator = OPERATORS[name], registered(name)

    def run(A: object, *operands: Tensor, values: Tensor | None = None) -> Tensor:
        sizes = _sizes(record, operands)
        m, n = sizes.get("m"), sizes.get("n")
        shape = None if m is None or n is None else (m, n)
        if values is not None and not record.reads_values:
            raise TypeError(f"{name}: argument 'values': the operator takes none")
        like = operands[0] if operands else None
        rowptr, col, _, n, own_values = operand_like(name, A, values, shape, like)
        return operator(rowptr, col, n, *((own_values,) if record.reads_values else ()), *operands)

    run.__name__ = run.__qualname__ = name
    run.__doc__ = _doc(record)
    return run


@cache
def registered(name: str) -> Operator[..., Tensor]:
    """`torch.ops.sparsetir.NAME`; takes (rowptr, col, n, values if it reads any, operands)."""
    record = OPERATORS[name]
    arguments = [("rowptr", "Tensor"), ("col", "Tensor"), ("n", "int")]
    arguments += [("a", "Tensor | None")] if record.reads_values else []
    arguments += [(operand, "Tensor") for operand in record.names]
    return Operator(
        name, make_dataclass(name, arguments, bases=(OfRecord,), namespace={"record": record})
    )


class OfRecord(Operation[Tensor]):
    """The torch operation defined by a record."""

    record: ClassVar[Record]
    rowptr: Tensor
    col: Tensor
    n: int

    @property
    def operands(self) -> list[Tensor]:
        """The operands in the order of the record."""
        return [getattr(self, name) for name in self.record.names]

    @property
    def values(self) -> Tensor | None:
        """The values of the matrix, or None."""
        return getattr(self, "a", None)

    def run(self) -> Tensor:
        record, values, operands = self.record, self.values, self.operands
        structure = structure_of(self.rowptr, self.col, self.n, record.name)
        first = operands[0] if operands else values
        assert first is not None
        feat = _checked_sizes(record, operands, structure).get("feat", 1)
        if values is not None:
            check_values(record.name, values, first, structure)
        structure = structure.transposed if record.transposed else structure
        return structure.run(record.name, operands, values, feat=feat)

    def fake(self) -> Tensor:
        sizes = {**_sizes(self.record, self.operands), "m": self.rowptr.shape[0] - 1}
        sizes |= {"n": self.n, "nnz": self.col.shape[-1]}
        first = next(x for x in (*self.operands, self.values) if x is not None)
        return first.new_empty([sizes[dim] for dim in self.record.axes("out")])

    @classmethod
    def refuse_gradients(cls, names: Iterable[str]) -> None:
        """Raise now, rather than in the backward pass, if a gradient cannot be derived."""
        for name in names:
            try:
                gradient_of(cls.record.name, name)
            except ValueError as error:
                expected = "a tensor that needs no gradient, as none can be derived"
                raise wrong(cls.record.name, name, expected, f"one that does ({error})") from None

    def gradients(self, grad: Tensor) -> Gradients:
        pattern = self.rowptr, self.col, self.n
        operands_by_name = dict(zip(self.record.names, self.operands, strict=True))

        def of(name: str) -> Tensor:
            back = gradient_of(self.record.name, name)
            # The operand that the operator itself does not have is the gradient of its result.
            operands = [operands_by_name.get(wanted, grad) for wanted in back.names]
            values = (self.values,) if back.reads_values else ()
            return registered(back.name)(*pattern, *values, *operands)

        return {name: partial(of, name) for name in ("a", *operands_by_name)}


def _sizes(record: Record, operands: Sequence[Tensor]) -> dict[str, int]:
    """Sizes by the names of dimensions, each from the first operand that has it."""
    names = record.names
    if len(operands) != len(names):
        raise TypeError(
            f"{record.name}: expected {len(names)} operands ({', '.join(names)}), got "
            f"{len(operands)}"
        )
    sizes: dict[str, int] = {}
    for name, x in zip(names, operands, strict=True):
        check_tensor(record.name, name, x, None if x is operands[0] else operands[0])
        dims = record.axes(name)
        if x.dim() != len(dims):
            raise wrong(record.name, name, f"{len(dims)} dimensions", f"shape {tuple(x.shape)}")
        for dim, size in zip(dims, x.shape, strict=True):
            sizes.setdefault(dim, size)
    return sizes


def _checked_sizes(
    record: Record, operands: Sequence[Tensor], structure: Structure
) -> dict[str, int]:
    """:func:`_sizes`, checked against the caller's pattern (ValueError)."""
    matrix = {"m": structure.m, "n": structure.n, "nnz": structure.nnz}
    sizes = {**_sizes(record, operands), **matrix}
    for name, x in zip(record.names, operands, strict=True):
        if x.device != structure.device:
            raise wrong(
                record.name, name, f"to be on {structure.device} as the sparse matrix", x.device
            )
        expected = tuple(sizes[dim] for dim in record.axes(name))
        if tuple(x.shape) != expected:
            raise wrong(record.name, name, f"shape {expected}", tuple(x.shape))
    return sizes


def _doc(record: Record) -> str:
    operands = "".join(f"{name} : {record.shape_text(name)} Tensor\n" for name in record.names)
    values = "values : (nnz,) Tensor, optional\n    Values instead of A's own.\n"
    return f"""{record.title[0].upper()}{record.title[1:]}.

Parameters
----------
A : sparse (m, n) matrix
    Any kind that :func:`resolve` accepts.
{operands}{values if record.reads_values else ""}
Returns
-------
{record.shape_text("out")} Tensor
    Differentiable with respect to operands and values, by programs derived from the operator's.
"""
