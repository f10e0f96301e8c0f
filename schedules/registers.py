"""How much of a CPU kernel stays in vector registers: the one place that says it.

AVX-512 and NEON have 32 vector registers, other x86 CPUs 16. A kernel's sums leave room for what
is loaded; a nest whose operands are read once for many sums can give them more of the registers.
"""

from __future__ import annotations

__all__ = ["sum_vectors", "most_sum_vectors"]


def sum_vectors(bits: int) -> int:
    """Vectors of sums of a tile, half of the registers; bits : of a vector.

    Each gathered element's column and value is loaded once for all of its vectors, so that wider
    tiles are faster as long as nothing is spilled.
    """
    return 16 if bits >= 512 else 8


def most_sum_vectors(bits: int) -> int:
    """Vectors of sums of products of tiles, three quarters of the registers."""
    return 24 if bits >= 512 else 12
