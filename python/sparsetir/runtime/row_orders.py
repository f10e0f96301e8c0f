"""Kernels of a built program for patterns whose rows have another order than that of the matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import tvm

from sparsetir.runtime.kernel import ByPattern, Kernel
from sparsetir.runtime.kernel_cache import COMPILING, kept_kernel
from sparsetir.runtime.pipeline import lower
from sparsetir.runtime.pool import work_of_threads
from sparsetir.schedules.row_orders import RowOrders
from sparsetir.schedules.templates import row_tile, spmv
from sparsetir.sparse_ir.nodes import SparseFunc


def by_pattern(kernel: Kernel, func: SparseFunc, rows: RowOrders) -> ByPattern:
    """The attribute :attr:`Kernel.by_pattern` of a program's kernel."""
    names, target = kernel.signature.names, kernel.target

    @lru_cache
    def compiled(config: Any) -> Kernel:
        what = f"{tvm.ir.save_json(func)} {config!r}"
        template: Any = spmv if isinstance(config, spmv.SlicedRows) else row_tile
        with COMPILING:
            stages = partial(lower, func, template.apply, config, target)
            other = kept_kernel(lambda: what, target, stages)[0]
        numbers = template.numbers(config)
        other.numbers = {name: n for name, n in numbers.items() if name in other.computed}
        return other

    def of(arguments: Mapping[str, Any]) -> Callable[[Sequence[Any]], Kernel | None] | None:
        choose = rows.of_pattern(arguments, work_of_threads())
        if choose is None:
            return None

        @lru_cache
        def for_features(feat: int) -> Kernel | None:
            config = choose(feat)
            return None if config is None else compiled(config)

        if not isinstance(rows.features, str):
            feat = 1 if rows.features is None else rows.features
            return lambda _: for_features(feat)
        place = names.index(rows.features)
        return lambda values: for_features(values[place])

    return of
