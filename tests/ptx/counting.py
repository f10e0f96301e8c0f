"""Costs of a launch on a GPU, counted a warp's instruction at a time, as NVIDIA's profiler does.

Counts are added to a launch's: "instructions" of warps, without those that ptxas drops, and
"lanes" that run them; "load", "store" and "atomic sectors" of 32 bytes, each once for a warp's
instruction; "memory sectors", each once for a launch that reads it and once more if it writes it;
"shared passes" of 128 bytes, and the "least passes" of the same instructions without conflicts;
"tensor operations", two for each product of `mma` and `wgmma`. The matrices that a `wgmma` reads
from shared memory count once for a warpgroup.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ptx.memory import Buffer
    from ptx.parse import Block

Array = Any  # of NumPy
WARP, SECTOR, PASS, WORD = 32, 32, 128, 4  # threads, and bytes
FREE = ("mov", "cvta", "ld.param")  # opcodes that become no instruction, as a rule
KINDS = {"read": "load", "nc": "load", "write": "store", "atomic": "atomic"}


class Cost:
    """The counts of a launch, and the sectors of each buffer that it touches."""

    def __init__(self, counts: Counter[str]) -> None:
        self.counts = counts
        self._touched: dict[tuple[int, bool], Array] = {}

    def issued(self, block: Block, ids: Array) -> None:
        """Count the instructions of a basic block that some lanes run."""
        count = sum(not s.opcode.startswith(FREE) for s in block.statements)
        count += block.end is not None
        self.counts["instructions"] += count * _distinct(ids // WARP)
        self.counts["lanes"] += count * len(ids)

    def in_global(self, address: Array, ids: Array, how: str, buffer: Buffer) -> None:
        """Count the sectors of an access to a buffer."""
        sectors = address // SECTOR
        self.counts[f"{KINDS[how]} sectors"] += _distinct(ids // WARP << 43 | sectors)
        for writes in (False, True) if how == "atomic" else (how == "write",):
            first = buffer.base // SECTOR
            size = (buffer.stop - 1) // SECTOR - first + 1
            touched = self._touched.setdefault((id(buffer), writes), np.zeros(size, bool))
            before = touched[sectors - first]
            touched[sectors - first] = True
            self.counts["memory sectors"] += _distinct(sectors[~before])

    def in_shared(self, address: Array, ids: Array, size: int) -> None:
        """Count passes over shared memory: neighbouring lanes share one up to 128 bytes.

        A pass gives a word of each of the 32 banks to all lanes that want it.
        """
        group, words = ids // min(WARP, PASS // size), address // WORD
        if size > WORD:
            words = (words[:, None] + np.arange(size // WORD)).reshape(-1)
            group = np.repeat(group, size // WORD)
        banks = PASS // WORD
        wanted = np.unique(group << 20 | words)
        bank, passes = np.unique((wanted >> 20) * banks + wanted % banks, return_counts=True)
        begins = np.flatnonzero(np.diff(bank // banks, prepend=-1))
        self.counts["shared passes"] += int(np.maximum.reduceat(passes, begins).sum())
        self.counts["least passes"] += len(begins)


def _distinct(numbers: Array) -> int:
    """The number of different values."""
    ordered = np.sort(numbers)
    return len(ordered) and 1 + int(np.count_nonzero(ordered[1:] != ordered[:-1]))
