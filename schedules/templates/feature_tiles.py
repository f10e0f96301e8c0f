"""Tiles of features: how many a config takes, and the loops over them."""

from __future__ import annotations

from typing import Any

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.schedule import Schedule, SpIter

__all__ = ["Tiled", "greatest_divisor", "in_tiles"]


class Tiled:
    """A config for tiles of features.

    feat : the one feature size it serves, or None: every multiple of `tile`
    tile : features of a tile
    """

    feat: Any
    tile: Any

    @property
    def compiled(self) -> Any:
        """What of it a kernel depends on: all, where a config does not say otherwise."""
        return self

    def tiles(self, feat: int) -> int:
        """Tiles of a feature size; raises ScheduleError for a size that the config does not serve.

        The argument `tiles` of kernels that have one.
        """
        if self.feat != feat and (self.feat is not None or feat % self.tile):
            serves = self.feat or f"multiples of {self.tile}"
            raise ScheduleError(
                f"{type(self).__name__}.tiles: argument 'feat': the config serves {serves} "
                f"features, got {feat}"
            )
        return -(-feat // self.tile)


def in_tiles(sch: Schedule, features: SpIter, config: Any) -> tuple[SpIter, list[SpIter]]:
    """Cut a loop over features: the loop over tiles, and those within a tile, lanes last.

    config : with `tile`, `lanes` and `feat` as in
        :class:`sparsetir.schedules.templates.spmm.RowBlocks`
    """
    tile, lanes = config.tile, config.lanes
    if config.feat is not None:
        sch.bound(features, config.feat, "exact")
    tail = "exact" if config.feat is None or config.feat % tile == 0 else "shift"
    if tile % lanes == 0:
        tiles, *vectors = sch.split(features, [None, tile // lanes, lanes], tail=tail)
        return tiles, vectors
    tiles, within = sch.split(features, [None, tile], tail=tail)
    return tiles, sch.split(within, [None, lanes], tail="shift")


def greatest_divisor(number: int, most: int) -> int:
    """The greatest divisor of a number up to `most`."""
    return max(d for d in range(1, most + 1) if number % d == 0)
