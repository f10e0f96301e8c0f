"""Things that are made once for tensors: found by their memory, confirmed by what is in it.

A version counter of torch does not say that a tensor is what it was: tensors of inference mode have
none, and `x.data`, NumPy and DLPack write past it. So whatever is made for tensors is made of
copies, and found again where these are equal to the tensors; a copy that the project has alone
(:func:`private`) is not compared again.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
import tvm_ffi
from torch import Tensor

from sparsetir.planning.run_plan import Plan
from sparsetir.runtime.arrays import dtype_name, itemsize
from sparsetir.runtime.kernel import Kernel

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D", bound="Deriving")
# By what an owner is known again: a copy, a function that says it, None of a private tensor.
Known = Tensor | Callable[[Tensor], bool] | None
RECENT = 16  # entries after which so many are measured again, as what they hold has grown
GROWTH = 16  # times the bytes of its owners that what is made for them is taken to reach
SMALL = 1 << 20  # bytes of owners up to which what is made of them is not measured before that


def lasting(make: Callable[P, T]) -> Callable[P, T]:
    """The same function, whose results may be kept.

    What is made in inference mode could not be used for gradients later.
    """

    @wraps(make)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            return make(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return make(*args, **kwargs)

    return call


# -- tensors that the project has alone -----------------------------------------------------------


class _Private:
    """Of a private tensor: its version, and what was handed out with it."""

    __slots__ = ("made", "version")

    def __init__(self, version: int) -> None:
        self.version = version
        self.made: object = None


_private: WeakKeyDictionary[torch.UntypedStorage, _Private] = WeakKeyDictionary()


@lasting
def private(x: Tensor, is_new: bool = False) -> Tensor:
    """A contiguous copy that nobody else has: it need not be compared to be known again.

    It may be shown to users, who are told not to write to it; what torch sees them write ends it.

    is_new : nobody else has x itself, which is contiguous: it becomes private, unless it was made
        in inference mode
    """
    as_it_is = is_new and not x.is_inference()
    copy = x if as_it_is else x.detach().clone(memory_format=torch.contiguous_format)
    _private[copy.untyped_storage()] = _Private(copy._version)
    return copy


def is_private(x: Tensor) -> bool:
    """Whether it is in the memory of what :func:`private` gave, and was not written to since."""
    found = _private.get(x.untyped_storage())
    return found is not None and not x.is_inference() and found.version == x._version


def hand_out(x: Tensor, made: object) -> None:
    """Have a private tensor carry something, which lives as long, and may not refer to it."""
    _private[x.untyped_storage()].made = made


def handed_out(x: Tensor) -> Any:
    """What a private tensor carries, or None."""
    try:
        found = _private.get(x.untyped_storage())
    except (RuntimeError, NotImplementedError):  # one without memory
        return None
    return None if found is None or not is_private(x) else found.made


# -- what is kept with a pattern ------------------------------------------------------------------


class Deriving:
    """A pattern that keeps what is made of it. May be used from several threads at once."""

    def __init__(self) -> None:
        self.made: dict[Hashable, object] = {}
        self._lock = threading.RLock()

    def derived(self: D, kind: Hashable, make: Callable[[D], T]) -> T:
        """What another module makes of the pattern, made once; may not refer to the pattern.

        Parameters
        ----------
        kind : hashable
            What it is kept by.
        make : callable
            Makes it of this pattern.

        Returns
        -------
        object
        """
        found = self.made.get(kind)
        if found is None:
            with self._lock:
                if kind not in self.made:
                    self.made[kind] = make(self)
                found = self.made[kind]
        return cast(T, found)


# -- what is kept for tensors ---------------------------------------------------------------------


class _Entry:
    """What was made, its bytes, copies of its owners, what tells whether they are what they were,
    and their storages."""

    __slots__ = ("checks", "copies", "made", "owners", "size")

    def __init__(
        self, made: object, copies: Sequence[Known], owners: Sequence[object], size: int
    ) -> None:
        self.made, self.copies, self.owners = made, copies, owners
        self.checks = [*map(_check_of, copies)]
        self.size = 2 * size if size <= SMALL else self.measured()

    def measured(self) -> int:
        """Its bytes as of now, copies and what tensors carry included."""
        return measured((self.made, self.copies), handed_out)


class Cache:
    """The things that were used last, bounded by their number and their bytes.

    An entry has owners, tensors that it was made for. It keeps copies of them, to compare, but not
    them: it is dropped when one of their storages is freed. May be used from several threads at
    once.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self.max_entries, self.max_bytes = max_entries, max_bytes
        self.bytes = 0
        self.misses = self._added = 0
        self._lock = threading.RLock()
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: Hashable, *owners: Tensor, count: bool = False) -> Any:
        """What is kept for a key and tensors, as these are now, or None; `count` if it is None."""
        full = (key, *map(memory_key, owners))
        with self._lock:
            entry = self._entries.get(full)
            if entry is not None:
                self._entries.move_to_end(full)
        if entry is not None:
            for x, unchanged in zip(owners, entry.checks, strict=True):
                if not unchanged(x):
                    break
            else:
                return entry.made
        self.misses += count
        return None

    def get(self, key: Hashable, make: Callable[..., T], *owners: Tensor) -> T:
        """What :meth:`find` finds, else what :meth:`keep` makes."""
        found = self.find(key, *owners)
        return self.keep(key, make, *owners) if found is None else found

    def keep(self, key: Hashable, make: Callable[..., T], *owners: Tensor) -> T:
        """What `make` gives for private copies of tensors, kept for these, whatever its size."""
        copies = [private(x) for x in owners]
        made = lasting(make)(*copies)
        compared = [None if is_private(x) else copy for x, copy in zip(owners, copies, strict=True)]
        self.put(key, made, owners, compared)
        return made

    def remember(self, key: Hashable, make: Callable[[], T], *owners: Tensor) -> T:
        """As :meth:`keep`, of what looks at the tensors itself."""
        copies = [None if is_private(x) else private(x) for x in owners]
        made = lasting(make)()
        self.put(key, made, owners, copies)
        return made

    def put(
        self, key: object, made: object, owners: Sequence[Tensor], copies: Sequence[Known]
    ) -> None:
        """Keep something for tensors, in the place of what was kept; copies : to know them by."""
        full = (key, *map(memory_key, owners))
        freed = lambda _: self._drop(full)  # noqa: E731
        storages = [weakref.ref(x.untyped_storage(), freed) for x in owners]
        entry = _Entry(made, copies, storages, sum(x.nbytes for x in owners))
        with self._lock:
            self._drop(full)
            self._added += 1
            if self._added % RECENT == 0 and self.bytes * GROWTH > self.max_bytes:
                self._measure(self._keys(RECENT))
            self._entries[full] = entry
            self.bytes += entry.size
            self._trim()

    def _drop(self, key: Hashable) -> object:
        """Forget one thing; any thread may come here whenever a tensor is freed."""
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self.bytes -= entry.size
        return entry  # which is freed without the lock

    def limit(self, entries: int | None, bytes: int | None) -> None:
        """Set limits; what is over them is dropped, but for the last thing used."""
        with self._lock:
            self.max_entries = entries or self.max_entries
            self.max_bytes = bytes or self.max_bytes
            self._measure(self._keys())
            self._trim()

    def clear(self) -> None:
        """Drop everything."""
        for key in self._keys():
            self._drop(key)

    def _keys(self, count: int | None = None) -> list[Hashable]:
        """Of what was used last, so many."""
        while True:
            try:
                return list(itertools.islice(reversed(self._entries), count))
            except RuntimeError:  # garbage was collected meanwhile, and with it an owner
                continue

    def measure(self) -> int:
        """Bytes of all that is kept, as of now."""
        with self._lock:
            self._measure(self._keys())
            return self.bytes

    def _measure(self, keys: list[Hashable]) -> None:
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:  # dropped since, as an owner was freed
                continue
            size = entry.measured()
            if self._entries.get(key) is entry:
                self.bytes += size - entry.size
                entry.size = size

    def _trim(self) -> None:
        while len(self._entries) > 1 and (
            len(self._entries) > self.max_entries or self.bytes > self.max_bytes
        ):
            self._drop(next(iter(self._entries), None))


# Patterns of tensors, and what is derived from them by any module.
kept = Cache(max_entries=512, max_bytes=4 << 30)


def memory_key(x: Tensor) -> Hashable:
    """Where a tensor is in memory, and how it lies there."""
    storage = x.untyped_storage()._cdata
    return storage, x.storage_offset(), x.shape, x.stride(), x.dtype


def _check_of(known: Known) -> Callable[[Tensor], bool]:
    """What tells whether an owner is what it was."""
    if known is None:
        return is_private
    if not isinstance(known, Tensor):
        return known
    compare = _memcmp()
    if compare is None or not known.is_cpu or known.is_floating_point():
        return lambda x: torch.equal(x, known)
    place, size = known.data_ptr(), known.nbytes

    def unchanged(x: Tensor) -> bool:
        if x.is_neg() or not x.is_contiguous():
            return torch.equal(x, known)
        return compare(x.data_ptr(), place, size) == 0

    return unchanged


def same(x: Tensor, y: Tensor) -> bool:
    """Whether tensors of one shape and type have equal numbers; y : contiguous. NaN equals none."""
    return _check_of(y)(x)


@cache
def _memcmp() -> Callable[[int, int, int], int] | None:
    """The function of libc: `torch.equal` takes several times as long for a small graph, and for a
    large one waits for other threads, which may be busy."""
    try:
        found: Any = ctypes.CDLL(None).memcmp
    except (OSError, TypeError, AttributeError):
        return None
    found.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    return found


def measured(thing: object, carried: Callable[[Tensor], object] | None = None) -> int:
    """Bytes of all arrays that can be reached from it, each piece of memory once.

    Goes through containers and objects of sparsetir; but for kernels, which others share.

    carried : gives what a tensor carries, which counts, too
    """
    sizes: dict[int, int] = {}
    seen: set[int] = set()
    left = [thing]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        found = _memory(one)
        if found is None:
            left += _parts(one)
        else:
            address, size = found
            sizes[address] = max(size, sizes.get(address, 0))
            if carried is not None and isinstance(one, Tensor):
                left.append(carried(one))
    return sum(sizes.values())


def _memory(array: object) -> tuple[int, int] | None:
    """Where the memory is that an array keeps, and its bytes; None of what is no array."""
    if isinstance(array, Tensor):
        try:
            storage = array.untyped_storage()
            return storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # one without memory
            return 0, 0
    if isinstance(array, np.ndarray):
        while isinstance(array.base, np.ndarray):
            array = array.base
        return array.__array_interface__["data"][0], array.nbytes
    if isinstance(array, tvm_ffi.Tensor):
        return array.data_ptr(), array.numel() * itemsize(dtype_name(array))
    return None


def _parts(thing: object) -> Iterator[object]:
    """What a container holds, or an object of ours."""
    if isinstance(thing, Plan):  # of what else it knows nothing is an array
        yield from (thing._args, thing._stored, thing._computed)
        return
    if isinstance(thing, Mapping):
        yield from list(thing.values())
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from list(thing)
    if type(thing).__module__.startswith("sparsetir.") and not isinstance(thing, Kernel):
        yield from list(getattr(thing, "__dict__", {}).values())
