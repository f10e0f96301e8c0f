"""Plans whose kernels need arrays of another shape: with more features, or with heads first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparsetir.planning.request import Request
from sparsetir.planning.run_plan import Plan
from sparsetir.records.task import Config
from sparsetir.runtime.arrays import changed, empty_like, hidden, is_strided, shape_of, with_zeros
from sparsetir.runtime.refusals import wrong


class _Copying(Plan):
    """A plan that copies the caller's arrays into the shape of its kernel in each run."""

    _given: Mapping[str, tuple[int, ...]]  # the caller's shapes, like those of a request
    _said = ""  # suffix of the expected shape in errors

    def __call__(self, *operands: object, out: object = None, values: object = None) -> object:
        """See :class:`Plan`."""
        if len(operands) != self._count or (values is not None and "a" not in self._given):
            return super().__call__(*operands, values=values)  # which raises
        arrays = dict(zip(self._operands, operands, strict=True), out=out, values=values)
        for name, array in arrays.items():
            if array is None and name in ("out", "values"):
                continue
            expected = self._given["a" if name == "values" else name]
            if (got := shape_of(array)) != expected:
                raise wrong(self.op, name, f"an array of shape {expected}{self._said}", got)
            if not is_strided(array) or (name == "out" and hidden(array)):
                instead = hidden(array) or "a dense array, got a sparse one"
                raise TypeError(f"{self.op}: argument '{name}': expected {instead}")
        self._check_memory(operands, values, out)
        padded = None
        if out is not None:
            self._refuse_overlap(out, operands, values)
            padded = empty_like(out, self._shapes["out"], f"{self.op}: argument 'out'")
        converted = [self._to_kernel(n, x) for n, x in zip(self._operands, operands, strict=True)]
        values = None if values is None else self._to_kernel("a", values)
        return self._from_kernel(super().__call__(*converted, out=padded, values=values), out)

    def repeat(self, operands: Sequence[object], values: object = None) -> object:
        """See :class:`Plan`."""
        converted = [self._to_kernel(n, x) for n, x in zip(self._operands, operands, strict=True)]
        result = super().repeat(converted, None if values is None else self._to_kernel("a", values))
        return None if result is None else self._from_kernel(result, None)

    def _to_kernel(self, name: str, array: object) -> object:
        """Convert an array to the kernel's shape."""
        raise NotImplementedError

    def _from_kernel(self, result: object, out: object) -> object:
        """Convert the kernel's result to the caller's shape, in `out` unless that is None."""
        raise NotImplementedError


class PaddedPlan(_Copying):
    """A plan whose kernel has more features than the caller, which are padded with zeros."""

    def __init__(self, wanted: Request, whole: Request, config: Config, chosen_by: str) -> None:
        super().__init__(whole, config, chosen_by)
        self.feat, self._given = wanted.feat, wanted.shapes

    def _to_kernel(self, name: str, array: object) -> object:
        return with_zeros(array, self._shapes[name])

    def _from_kernel(self, result: object, out: object) -> object:
        part = tuple(slice(size) for size in self._given["out"])
        return changed(result, lambda x: x[part], out)


class HeadsPlan(_Copying):
    """A plan for callers with heads second: (nodes, heads, features), (elements, heads).

    Kernels have heads first, and so have operators for torch, which do not use such plans.
    """

    _said = ", with heads as the second dimension"

    @classmethod
    def of(cls, made: Plan) -> HeadsPlan:
        """Wrap a plan with heads first."""
        plan = cls.__new__(cls)
        plan.__dict__.update(made.__dict__)
        plan._given = {name: (s[1], s[0], *s[2:]) for name, s in made._shapes.items()}
        return plan

    def _to_kernel(self, name: str, array: object) -> object:
        return changed(array, _swapped)

    def _from_kernel(self, result: object, out: object) -> object:
        return changed(result, _swapped, out)


def _swapped(array: Any) -> object:
    return array.swapaxes(0, 1)
