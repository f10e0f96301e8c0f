"""Published peaks of GPUs, and the seconds that the counts of a launch take there at least."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple


class Gpu(NamedTuple):
    """A GPU's published limits and peaks.

    arch : what ptxas compiles for
    shared : bytes of a multiprocessor; count : of these
    memory, tensor : bytes and operations of float16 products a second
    level2 : bytes a clock; the H100's, which is not published, as the A100's
    """

    arch: str
    shared: int
    count: int
    clock: float
    memory: float
    tensor: float
    level2: int = 5120

    def occupancy(self, registers: int, threads: int, shared: int) -> float:
        """The share of a multiprocessor's 64 warps that run at a time."""
        warps = -(-threads // 32)
        by_registers = 65536 // (-(-registers // 8) * 256 * warps)
        return min(by_registers, self.shared // (shared + 1024), 64 // warps, 32) * warps / 64

    def bounds(self, counts: Counter[str]) -> dict[str, float]:
        """Seconds that the counts of a launch take at least, by what is needed."""
        sectors = sum(counts[f"{kind} sectors"] for kind in ("load", "store", "atomic"))
        return {
            "issue": counts["instructions"] / (4 * self.count * self.clock),
            "level 2": 32 * sectors / (self.level2 * self.clock),
            "memory": 32 * counts["memory sectors"] / self.memory,
            "shared": counts["shared passes"] / (self.count * self.clock),
            "tensor": counts["tensor operations"] / self.tensor,
        }


GPUS = {
    "A100": Gpu("sm_80", 164 << 10, 108, 1.41e9, 1.555e12, 312e12),
    "H100": Gpu("sm_90", 228 << 10, 132, 1.83e9, 3.35e12, 989e12),
}
