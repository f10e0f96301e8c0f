"""How many tiles of features a config takes."""

from __future__ import annotations

from typing import Any

from sparsetir.sparse_ir.errors import ScheduleError

__all__ = ["Tiled"]


class Tiled:
    """A config for tiles of features.

    feat : the one feature size it serves, or None: every multiple of `tile`
    tile : features of a tile
    """

    feat: Any
    tile: Any

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
