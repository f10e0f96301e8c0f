"""Plans whose kernels take arrays in another shape: with more features, or with heads first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparsetir.planning.request import Request
from sparsetir.planning.row_tables_plan import RowTablesPlan
from sparsetir.planning.run_plan import Plan
from sparsetir.planning.sparse_plan import SparsePlan, ValuesPlan
from sparsetir.records.task import Config
from sparsetir.runtime.arrays import empty_like, is_array, leading, swapped, with_zeros
from sparsetir.runtime.refusals import wrong
from sparsetir.schedules.gpu.row_tables import RowTables


def plan_with(wanted: Request, config: Config, chosen_by: str = "user") -> Plan:
    """The plan of a request with a config, for the sizes that this is for."""
    if wanted.operator.on == "matrices":
        on_gpu = RowTablesPlan if isinstance(config, RowTables) else ValuesPlan
        return (on_gpu if wanted.gpu else SparsePlan)(wanted, config, chosen_by)
    whole = wanted.whole
    padded = whole is not wanted and whole.sizes != wanted.sizes
    if padded and whole.sizes == {**whole.sizes, **_sizes_of(config)}:
        return PaddedPlan(wanted, whole, config, chosen_by)
    return Plan(wanted, config, chosen_by)


def _sizes_of(config: Config) -> dict[str, int]:
    """The feature sizes that a config is for, None where it serves any."""
    return {name: getattr(config, name) for name in ("feat_in", "feat")}


def _check_shapes(
    op: str, shapes: Mapping[str, tuple[int, ...]], arrays: Mapping[str, object], said: str = ""
) -> None:
    """Raise for arrays, by name, of other shapes; a result and values may be None.

    said : behind the shape that is expected
    """
    for name, array in arrays.items():
        if array is None and name in ("out", "values"):
            continue
        expected = shapes["a" if name == "values" else name]
        got = getattr(array, "shape", type(array).__name__)
        if not is_array(array) or tuple(got) != expected:
            raise wrong(op, name, f"an array of shape {expected}{said}", got)


class PaddedPlan(Plan):
    """A plan whose kernel has more features than are given: zeros are put behind these.

    Operands, and results, are copied in each run where their features are not those of the kernel.
    """

    def __init__(self, wanted: Request, whole: Request, config: Config, chosen_by: str) -> None:
        super().__init__(whole, config, chosen_by)
        self.feat, self._given = wanted.feat, wanted.shapes

    def __call__(self, *operands: object, out: object = None, values: object = None) -> Any:
        """As of :class:`Plan`."""
        if len(operands) != len(self._operands):
            return super().__call__(*operands)  # which says what is wrong
        given = dict(zip(self._operands, operands, strict=True), out=out)
        _check_shapes(self.op, self._given, given)
        self._check_memory(operands, values, out)
        whole = out
        if out is not None:
            self._refuse_overlap(out, operands, values)
            whole = empty_like(out, self._shapes["out"], f"{self.op}: argument 'out'")
        found = super().__call__(*self._padded(operands), out=whole, values=values)
        return leading(found, self._given["out"], out)

    def run_trusted(self, operands: Sequence[object], values: object = None) -> Any:
        """As of :class:`Plan`."""
        return leading(super().run_trusted(self._padded(operands), values), self._given["out"])

    def _run_detached(self, operands: Sequence[Any], values: Any) -> Any:
        plain = [x.detach() for x in operands]
        return super().__call__(*plain, values=None if values is None else values.detach())

    def _padded(self, operands: Sequence[object]) -> list[object]:
        named = zip(self._operands, operands, strict=True)
        return [with_zeros(array, self._shapes[name]) for name, array in named]


class HeadsPlan(Plan):
    """A plan whose callers have heads second: (nodes, heads, features), (elements, heads).

    Kernels have them first, so operands, values and results are copied in each run. Operators for
    torch have arrays as kernels take them: they make no such plan.
    """

    @classmethod
    def of(cls, made: Plan) -> HeadsPlan:
        """A plan for these callers."""
        found = cls.__new__(cls)
        found.__dict__.update(made.__dict__)
        return found

    def __call__(self, *operands: object, out: object = None, values: object = None) -> Any:
        """As of :class:`Plan`."""
        if len(operands) != self._count or (values is not None and "a" not in self._shapes):
            return super().__call__(*operands, values=values)  # which says what is wrong
        shapes = {name: (s[1], s[0], *s[2:]) for name, s in self._shapes.items()}
        given = dict(zip(self._operands, operands, strict=True), out=out, values=values)
        _check_shapes(self.op, shapes, given, ", with heads as the second dimension")
        self._check_memory(operands, values, out)
        first = None
        if out is not None:
            self._refuse_overlap(out, operands, values)
            first = empty_like(out, self._shapes["out"], f"{self.op}: argument 'out'")
        turned = None if values is None else swapped(values)
        return swapped(super().__call__(*map(swapped, operands), out=first, values=turned), out)
