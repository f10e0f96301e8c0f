"""Things that are made once for tensors, by the memory that these are in."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, Generic, TypeVar

from torch import Tensor

__all__ = ["Cache", "memory_key"]

T = TypeVar("T")


class Cache(Generic[T]):
    """The things that were used last, bounded by their number and their bytes.

    Each entry has an owner, which it keeps alive, so that nothing else comes to lie in the memory
    that the key names. May be used from several threads at once.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self.max_entries, self.max_bytes = max_entries, max_bytes
        self.bytes = 0
        self.misses = 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[Any, tuple[T, int, Any]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Any) -> T | None:
        """What is kept for a key."""
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                self.misses += 1
                return None
            self._entries.move_to_end(key)
            return found[0]

    def put(self, key: Any, made: T, nbytes: int, owner: Any) -> T:
        """Keep it, whatever its size; gives another thread's, if that was faster."""
        with self._lock:
            if key in self._entries:
                return self._entries[key][0]
            self._entries[key] = made, nbytes, owner
            self.bytes += nbytes
            self._trim()
            return made

    def drop(self, key: Any) -> None:
        """Forget one thing."""
        with self._lock:
            _, nbytes, _ = self._entries.pop(key, (None, 0, None))
            self.bytes -= nbytes

    def limit(self, entries: int | None, bytes: int | None) -> None:
        """Set limits; what is over them is dropped, but for the last thing used."""
        with self._lock:
            self.max_entries = entries or self.max_entries
            self.max_bytes = bytes or self.max_bytes
            self._trim()

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._entries.clear()
            self.bytes = 0

    def _trim(self) -> None:
        while len(self._entries) > 1 and (
            len(self._entries) > self.max_entries or self.bytes > self.max_bytes
        ):
            _, (_, nbytes, _) = self._entries.popitem(last=False)
            self.bytes -= nbytes


def memory_key(x: Tensor) -> tuple[Any, ...]:
    """What tells a tensor from others that are alive, and from itself before it was written to."""
    version = -1 if x.is_inference() else x._version
    return x.data_ptr(), version, x.shape, x.stride(), x.dtype, x.device
