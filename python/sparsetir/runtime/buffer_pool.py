"""A pool of buffers for sparse results, reused once their results are freed.

The number of a result's elements is not known in advance, so it is written to a buffer that could
hold more. The system maps such memory page by page and clears each page, which several threads at
once contend for. So large buffers whose results were freed are kept for the next results. A result
owns its buffer as long as any array, tensor or view of it exists.

Buffers below `LEAST` are left to the C library, which reuses them itself; those above `MOST` are
returned to the system, and the result is shrunk to its size.
"""

from __future__ import annotations

from math import prod

import numpy as np

LEAST = 1 << 25  # bytes up to which malloc itself keeps freed memory
MOST = 1 << 28  # total bytes of free buffers

_free: list[_Memory] = []


class _Memory:
    def __init__(self, size: int) -> None:
        self.array = np.empty(size, np.uint8)


class _Lease:
    """The owner of a buffer, referenced by all arrays in it; its end frees the buffer."""

    def __init__(self, memory: _Memory) -> None:
        self._memory = memory
        self.__array_interface__ = memory.array.__array_interface__

    def __del__(self) -> None:
        _free.append(self._memory)
        while sum(x.array.nbytes for x in [*_free]) > MOST:
            _free.pop(0)


def array(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array, whose memory may be reused.

    Parameters
    ----------
    shape : tuple of int
        Its shape.
    dtype : dtype
        The type of its elements.

    Returns
    -------
    ndarray
        An array that owns its memory if its buffer is not to be reused.
    """
    size = prod(shape) * dtype.itemsize
    if not LEAST <= size <= MOST:
        return np.empty(shape, dtype)
    lease = _Lease(_claim(size) or _Memory(size))
    return np.asarray(lease)[:size].view(dtype).reshape(shape)


def _claim(size: int) -> _Memory | None:
    """Take the smallest free buffer that is large enough; None if there is none."""
    for memory in sorted([*_free], key=lambda x: x.array.nbytes):
        if memory.array.nbytes >= size:
            try:
                _free.remove(memory)
            except ValueError:  # another thread took it
                continue
            return memory
    return None


def release() -> None:
    """Return memory that is kept for later results to the system.

    Existing results are not affected. A process keeps at most 256 MiB.
    """
    _free.clear()
