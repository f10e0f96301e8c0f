"""Plans whose kernels take arrays in another shape: with more features, or with heads first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparsetir.planning.request import Request
from sparsetir.planning.run_plan import Plan
from sparsetir.records.task import Config
from sparsetir.runtime.arrays import changed, empty_like, hidden, is_strided, shape_of, with_zeros
from sparsetir.runtime.refusals import wrong


class _Copying(Plan):
    """A plan whose kernel takes arrays in another shape than callers have: copied in each run."""

    _given: Mapping[str, tuple[int, ...]]  # shapes of callers, as of a request
    _said = ""  # behind the shape that is expected

    def __call__(self, *operands: object, out: object = None, values: object = None) -> object:
        """As of :class:`Plan`."""
        if len(operands) != self._count or (values is not None and "a" not in self._given):
            return super().__call__(*operands, values=values)  # which says what is wrong
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
        own = None
        if out is not None:
            self._refuse_overlap(out, operands, values)
            own = empty_like(out, self._shapes["out"], f"{self.op}: argument 'out'")
        taken = [self._taken(n, x) for n, x in zip(self._operands, operands, strict=True)]
        values = None if values is None else self._taken("a", values)
        return self._gave(super().__call__(*taken, out=own, values=values), out)

    def repeat(self, operands: Sequence[object], values: object = None) -> object:
        """As of :class:`Plan`."""
        taken = [self._taken(n, x) for n, x in zip(self._operands, operands, strict=True)]
        found = super().repeat(taken, None if values is None else self._taken("a", values))
        return None if found is None else self._gave(found, None)

    def _taken(self, name: str, array: object) -> object:
        """An array as the kernel takes it."""
        raise NotImplementedError

    def _gave(self, found: object, out: object) -> object:
        """The kernel's result as callers have it, in `out` if that is there."""
        raise NotImplementedError


class PaddedPlan(_Copying):
    """A plan whose kernel has more features than are given: zeros are put behind these."""

    def __init__(self, wanted: Request, whole: Request, config: Config, chosen_by: str) -> None:
        super().__init__(whole, config, chosen_by)
        self.feat, self._given = wanted.feat, wanted.shapes

    def _taken(self, name: str, array: object) -> object:
        return with_zeros(array, self._shapes[name])

    def _gave(self, found: object, out: object) -> object:
        part = tuple(slice(size) for size in self._given["out"])
        return changed(found, lambda x: x[part], out)


class HeadsPlan(_Copying):
    """A plan whose callers have heads second: (nodes, heads, features), (elements, heads).

    Kernels have them first. Operators for torch have arrays as kernels take them: they make no such
    plan.
    """

    _said = ", with heads as the second dimension"

    @classmethod
    def of(cls, made: Plan) -> HeadsPlan:
        """A plan for these callers."""
        found = cls.__new__(cls)
        found.__dict__.update(made.__dict__)
        found._given = {name: (s[1], s[0], *s[2:]) for name, s in made._shapes.items()}
        return found

    def _taken(self, name: str, array: object) -> object:
        return changed(array, _swapped)

    def _gave(self, found: object, out: object) -> object:
        return changed(found, _swapped, out)


def _swapped(array: Any) -> object:
    return array.swapaxes(0, 1)
