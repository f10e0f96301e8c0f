"""A pattern in a format: the arguments of decomposed programs, their size, and the way back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sparsetir.formats.decompose import decompose_format
from sparsetir.formats.format_part import FormatPart
from sparsetir.formats.make_rules import Operand
from sparsetir.formats.pattern import Pattern
from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.sparse_ir.errors import StructureError
from sparsetir.sparse_ir.nodes import SparseFunc


@dataclass(frozen=True)
class PartStatistics:
    """Elements and padding of one rule's part.

    Parameters
    ----------
    rule : str
        Name of the rule.
    stored : int
        Number of elements.
    places : int
        Number of slots, padding included.
    index_bytes : int
        Size of index arrays and mask, in bytes.
    value_bytes : int
        Size of the values of all buffers, padding included, in bytes.
    """

    rule: str
    stored: int
    places: int
    index_bytes: int
    value_bytes: int

    @property
    def padding(self) -> float:
        """The share of slots without an element."""
        return 1.0 - self.stored / self.places if self.places else 0.0


class ConvertedFormat:
    """A pattern in a format, the result of :meth:`Format.convert`.

    Parameters
    ----------
    name : str
        Name of the format.
    pattern : Pattern
        The converted pattern; values are passed and returned in its order.
    operand : Operand
        The stored buffers.
    parts : list of FormatPart
        The arrays of each rule.
    labels : mapping of str to str, optional
        The contents of each rule's part in words, by rule name; by default these names.
    """

    name: str
    pattern: Pattern
    operand: Operand
    parts: list[FormatPart]

    keeps_order = False  # of the pattern: values move to the slots of parts

    def __init__(
        self, name: str, pattern: Pattern, operand: Operand, parts: list[FormatPart],
        labels: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.pattern, self.operand, self.parts = name, pattern, operand, parts
        self.labels: Mapping[str, str] | dict[str, str] = labels or {
            p.rule.name: p.rule.name for p in parts
        }
        if sum(p.stored for p in parts) != pattern.nnz:
            self._refuse_parts()

    @property
    def rules(self) -> list[FormatRewriteRule]:
        """The rules of the parts."""
        return [p.rule for p in self.parts]

    @cached_property
    def full(self) -> list[str]:
        """Names of rules that need no mask, since every slot holds an element."""
        return [p.rule.name for p in self.parts if p.rule.masked and p.full]

    def decompose(self, func: SparseFunc, drop_full_masks: bool = True) -> SparseFunc:
        """`decompose_format` of a function with these rules.

        Parameters
        ----------
        func : SparseFunc
            A stage-I function.
        drop_full_masks : bool
            Omit masks that hold only ones; the function then only serves patterns that
            fill the same parts, and `arguments` has no such masks.

        Returns
        -------
        SparseFunc
        """
        return decompose_format(func, self.rules, self.full if drop_full_masks else ())

    def arguments(self, drop_full_masks: bool = True, /, **stored: Any) -> dict[str, Any]:
        """Index arrays, sizes, masks and values by the names of a decomposed function's parameters.

        Parameters
        ----------
        drop_full_masks : bool
            The argument of :meth:`decompose`.
        **stored
            Values, as for :meth:`values`.

        Returns
        -------
        dict of str to array or int
        """
        out: dict[str, Any] = {}
        for part in self.parts:
            drop = drop_full_masks and part.full
            out |= part.indices if drop else part.arguments
        return {**out, **self.values(**stored)}

    def values(self, /, **stored: Any) -> dict[str, np.ndarray]:
        """The arrays of values, by the names of a decomposed function's parameters.

        They change between runs of a kernel, unlike :meth:`arguments` without values.

        Parameters
        ----------
        **stored : (nnz,) array or None
            Values of the operand's buffers by name, in the order of the pattern, from NumPy
            or another library on the CPU; None for a buffer that a program writes, which is
            initialised with zeros. Rules may encode them.

        Returns
        -------
        dict of str to ndarray
        """
        out: dict[str, np.ndarray] = {}
        dtypes = dict(self.operand.buffers)
        for name, values in stored.items():
            if name not in dtypes:
                raise ValueError(
                    f"{self.name}: expected values of some of {sorted(dtypes)}, got '{name}'"
                )
            if values is not None:
                values = self._checked(name, _as_numpy(values), dtypes[name])
            for part in self.parts:
                if values is None:
                    out[self.parameter(name, part)] = np.zeros(part.shape, np.dtype(dtypes[name]))
                else:
                    out |= self._arrays(name, part, values)
        return out

    def restore(self, name: str, arguments: dict[str, Any]) -> np.ndarray:
        """The values of a buffer in the order of the pattern, from a kernel's arguments.

        Parameters
        ----------
        name : str
            Name of the buffer.
        arguments : dict of str to array
            The result of :meth:`arguments`.

        Returns
        -------
        (nnz,) ndarray
        """
        values = [np.asarray(arguments[self.parameter(name, p)]) for p in self.parts]
        out = np.zeros(self.pattern.nnz, values[0].dtype)
        for part, stored in zip(self.parts, values, strict=True):
            part.restore(stored, out)
        return out

    def parameter(self, name: str, part: FormatPart) -> str:
        """The parameter of a buffer of the operand in a part.

        Parameters
        ----------
        name : str
            Name of the buffer.
        part : FormatPart
            The part.

        Returns
        -------
        str
        """
        handle = part.rule.new_format_desc.buffer(name).handle
        if handle is None:
            raise ValueError(
                f"{self.name}: rule '{part.rule.name}' stores no values of '{name}': those that it "
                "encodes can only be read, and do not come back exactly"
            )
        return part.rule.renamed(str(handle.name))

    @property
    def places(self) -> int:
        """The number of slots of all parts, padding included."""
        return sum(p.size for p in self.parts)

    @property
    def padding(self) -> float:
        """The share of slots without an element (SparseTIR, tables 1 and 2)."""
        return 1.0 - self.pattern.nnz / self.places if self.places else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of all index arrays, masks and values."""
        return sum(s.index_bytes + s.value_bytes for s in self.statistics)

    @property
    def statistics(self) -> list[PartStatistics]:
        """Statistics of each rule's part, in the order of the rules."""
        return [
            PartStatistics(
                p.rule.name, p.stored, p.size,
                sum(a.nbytes for a in p.indices.values() if isinstance(a, np.ndarray))
                + (p.size if p.rule.masked and not p.full else 0),
                sum(self._value_bytes(p, *buffer) for buffer in self.operand.buffers),
            )
            for p in self.parts
        ]  # fmt: skip

    def __repr__(self) -> str:
        return (
            f"<{self.name}: {len(self.parts)} part{'s' * (len(self.parts) != 1)}, "
            f"{self.pattern.nnz} elements, {self.padding:.1%} padding, {self.nbytes} bytes>"
        )

    def _arrays(self, name: str, part: FormatPart, values: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays that hold a buffer's values in a part, by parameter."""
        stored, encode = part.values(values), part.rule.encode
        if encode is None or name != part.rule.decoded:
            return {self.parameter(name, part): stored}
        return {self.parameter(n, part): array for n, array in encode(part, stored).items()}

    def _value_bytes(self, part: FormatPart, name: str, dtype: str) -> int:
        if name != part.rule.decoded:
            return part.size * np.dtype(dtype).itemsize
        zeros = np.zeros(part.count, np.dtype(dtype))
        return sum(array.nbytes for array in self._arrays(name, part, zeros).values())

    def _checked(self, name: str, values: np.ndarray, dtype: str) -> np.ndarray:
        if values.dtype != np.dtype(dtype) or values.shape != (self.pattern.nnz,):
            raise ValueError(
                f"{self.name}: argument '{name}': expected ({self.pattern.nnz},) {dtype}, got "
                f"{values.shape} {values.dtype}"
            )
        return values

    def _refuse_parts(self) -> None:
        taken = np.zeros(self.pattern.nnz, np.int64)
        for part in self.parts:
            taken += part.places >= 0
        at = int((taken != 1).argmax())
        coordinate = tuple(int(c[at]) for c in self.pattern.coords)
        what = "no rule takes" if taken[at] == 0 else f"{taken[at]} rules take"
        raise StructureError(f"{self.name}: {what} coordinate {coordinate}")


def _as_numpy(values: Any) -> np.ndarray:
    """Values as a NumPy array; another library's arrays on the CPU are not copied."""
    foreign = hasattr(values, "__dlpack__") and not isinstance(values, np.ndarray)
    return np.from_dlpack(values) if foreign else np.asarray(values)
