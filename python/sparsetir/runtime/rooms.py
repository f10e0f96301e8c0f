"""Memory that sparse results are made in, used again when nobody has what was made in it.

How many elements a result has is not known before it is there: it is made in rooms that could hold
more. The system gives such memory page by page and clears each, which several threads at once wait
for. So large rooms whose results are gone are kept, and the next results made in them. A result
has its room to itself as long as any array, tensor or view of it is there.

Rooms below `LEAST` are left to the C library, which keeps them by itself; above `MOST` they go
back to the system, and the result has no more than it needs.
"""

from __future__ import annotations

from math import prod

import numpy as np

LEAST = 1 << 25  # bytes, up to which malloc keeps memory that is freed
MOST = 1 << 28  # bytes of rooms that nothing is in, in all

_free: list[_Memory] = []


class _Memory:
    def __init__(self, size: int) -> None:
        self.array = np.empty(size, np.uint8)


class _Lease:
    """What all arrays in a room hold on to: the room is free when it goes."""

    def __init__(self, memory: _Memory) -> None:
        self._memory = memory
        self.__array_interface__ = memory.array.__array_interface__

    def __del__(self) -> None:
        _free.append(self._memory)
        while sum(x.array.nbytes for x in [*_free]) > MOST:
            _free.pop(0)


def room(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array of any contents, whose memory may have been another result's.

    Parameters
    ----------
    shape : tuple of int
        Its shape.
    dtype : dtype
        Of its elements.

    Returns
    -------
    ndarray
        Of memory that is its own and of its views; one that owns it where it is not to be kept.
    """
    size = prod(shape) * dtype.itemsize
    if not LEAST <= size <= MOST:
        return np.empty(shape, dtype)
    lease = _Lease(_taken(size) or _Memory(size))
    return np.asarray(lease)[:size].view(dtype).reshape(shape)


def _taken(size: int) -> _Memory | None:
    """The least memory that is free and large enough, which then is free no more."""
    for memory in sorted([*_free], key=lambda x: x.array.nbytes):
        if memory.array.nbytes >= size:
            try:
                _free.remove(memory)
            except ValueError:  # another thread has it
                continue
            return memory
    return None


def release() -> None:
    """Give the memory back to the system that is kept for results to come.

    What results are in is not touched. At most 256 MiB are kept in a process.
    """
    _free.clear()
