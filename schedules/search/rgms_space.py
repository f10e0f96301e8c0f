"""The configs that are tried for relational gather-matmul-scatter on CPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sparsetir.schedules.operators.rgms import Rgms
from sparsetir.schedules.search.choose_rgms import choose_rgms
from sparsetir.schedules.templates import rgms as template
from sparsetir.schedules.templates.rgms import TiledRelations
from sparsetir.schedules.versions import WORK_OF_THREADS
from sparsetir.sparse_ir.schedule import Schedule

ROWS = (4, 6, 8, 12, 16)
VECTORS = (1, 2, 4)  # of a tile of features
COST = (4, 8, 16, 32)
CACHES = (0.5, 1, 2)  # of the cache that rows of the result are to stay in
PREFETCH = (0, 8, 16, 32)
AHEAD = (0, 6, 12, 24)


def space(
    problem: Rgms, nnz_rows: int, feat_in: int, feat: int, target: Any, threads: int = 1,
    relations: int = 1, blocks: int = 1, work_of_threads: int = WORK_OF_THREADS,
) -> dict[str, tuple[Any, ...]]:  # fmt: skip
    """Values of each field of :class:`TiledRelations`, the chosen config's first.

    Searched are rows, tile, cost, cache, prefetch, ahead, packed and, for several threads, whether
    to use them (`parallel`, which is no choice of its own, follows); the other fields have one
    value. Arguments as of :func:`choose_rgms`.

    `tune(program(problem), arguments, schedule=apply, space=space(...))` searches them.
    """
    sizes = nnz_rows, feat_in, feat
    chosen = choose_rgms(problem, *sizes, target, threads, relations, blocks, work_of_threads)
    lanes = chosen.lanes
    tried: dict[str, tuple[Any, ...]] = {
        "rows": ROWS,
        "tile": tuple(n * lanes for n in VECTORS if feat % (n * lanes) == 0),
        "cost": COST,
        "cache": tuple(int(chosen.cache * part) for part in CACHES),
        "prefetch": PREFETCH,
        "ahead": AHEAD,
        "packed": (False, True),
        "threads": (1, threads),
    }
    return {
        name: tuple(dict.fromkeys((value, *tried.get(name, ()))))
        for name, value in asdict(chosen).items()
        if name != "parallel"
    }


def configs(
    problem: Rgms, nnz_rows: int, feat_in: int, feat: int, target: Any, threads: int = 1,
    relations: int = 1, blocks: int = 1, work_of_threads: int = WORK_OF_THREADS,
) -> list[TiledRelations]:  # fmt: skip
    """The chosen config, and those that differ from it in one field of the :func:`space`."""
    sizes = nnz_rows, feat_in, feat
    fields = space(problem, *sizes, target, threads, relations, blocks, work_of_threads)
    first = {name: values[0] for name, values in fields.items()}
    others = ((name, value) for name, values in fields.items() for value in values[1:])
    return [config_of(first), *(config_of({**first, name: value}) for name, value in others)]


def config_of(choices: Mapping[str, Any]) -> TiledRelations:
    """The config of one of each of the :func:`space`'s values."""
    return TiledRelations(**choices, parallel=choices["threads"] > 1)


def apply(sch: Schedule, config: Mapping[str, Any]) -> None:
    """Schedule the operator by one of each of the :func:`space`'s values."""
    template.apply(sch, config_of(config))
