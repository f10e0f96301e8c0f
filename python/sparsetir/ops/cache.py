"""Things that are made once for tensors, by the memory that these are in."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from sparsetir.ops.measured import measured

__all__ = ["Cache", "kept", "lasting", "memory_key"]

P = ParamSpec("P")
T = TypeVar("T")
RECENT = 4  # entries that are measured again whenever one is added


class Cache:
    """The things that were used last, bounded by their number and their bytes.

    Each entry has owners, which it keeps alive, so that nothing else comes to be where the key
    says. May be used from several threads at once.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self.max_entries, self.max_bytes = max_entries, max_bytes
        self.bytes = 0
        self.misses = 0
        self._lock = threading.RLock()
        self._entries: OrderedDict[Any, tuple[Any, int, Any]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Any, count: bool = False) -> Any:
        """What is kept for a key, or None; `count` if it is None."""
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                self.misses += count
                return None
            self._entries.move_to_end(key)
            return found[0]

    def put(self, key: Any, made: Any, *owners: Any) -> Any:
        """Keep it, whatever its size; gives another thread's, if that was faster.

        owners : what the key names; of tensors their storages, as a tensor may get another one
        """
        kept = [x.untyped_storage() if isinstance(x, Tensor) else x for x in owners]
        size = measured(made)
        with self._lock:
            if key in self._entries:
                return self._entries[key][0]
            # What was used last has grown since.
            self._measure(list(itertools.islice(reversed(self._entries), RECENT)))
            self._entries[key] = made, size, kept
            self.bytes += size
            self._trim()
            return made

    def drop(self, key: Any) -> None:
        """Forget one thing."""
        with self._lock:
            _, size, _ = self._entries.pop(key, (None, 0, None))
            self.bytes -= size

    def limit(self, entries: int | None, bytes: int | None) -> None:
        """Set limits; what is over them is dropped, but for the last thing used."""
        with self._lock:
            self.max_entries = entries or self.max_entries
            self.max_bytes = bytes or self.max_bytes
            self._measure(list(self._entries))
            self._trim()

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._entries.clear()
            self.bytes = 0

    def measure(self) -> int:
        """Bytes of all that is kept, as of now."""
        with self._lock:
            self._measure(list(self._entries))
            return self.bytes

    def _measure(self, keys: list[Any]) -> None:
        for key in keys:
            if key not in self._entries:  # dropped since, as its owner died
                continue
            made, before, kept = self._entries[key]
            size = measured(made)
            self._entries[key] = made, size, kept
            self.bytes += size - before

    def _trim(self) -> None:
        while len(self._entries) > 1 and (
            len(self._entries) > self.max_entries or self.bytes > self.max_bytes
        ):
            _, (_, size, _) = self._entries.popitem(last=False)
            self.bytes -= size


# Patterns of tensors, and what is derived from them by any module: all that is kept by memory.
kept = Cache(max_entries=512, max_bytes=4 << 30)


def memory_key(x: Tensor) -> tuple[Any, ...]:
    """What tells a tensor from all whose storages are alive, and from itself before writing to it.

    Some writing goes unseen: through `x.data`, through NumPy and others that share the memory, and
    to tensors that were made in inference mode, which count no versions.
    """
    storage = x.untyped_storage()._cdata  # itself, as its memory may be let go of while it lives
    try:
        version = x._version
    except RuntimeError:  # of inference mode
        version = -1
    return storage, x.storage_offset(), version, x.shape, x.stride(), x.dtype


def lasting(make: Callable[P, T]) -> Callable[P, T]:
    """The same function, whose results may be kept.

    What is made in inference mode could not be used for gradients later.
    """
    return torch.inference_mode(False)(torch.no_grad()(make))
