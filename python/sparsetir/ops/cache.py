"""A cache of objects derived from tensors: looked up by memory address, confirmed by contents.

Torch's version counter does not show that a tensor is unchanged: tensors of inference mode have
none, and writes through `x.data`, NumPy and DLPack bypass it. So objects are derived from copies,
and found again while these equal the tensors; a copy that only this package holds
(:func:`private`) needs no comparison.
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
# How to recognise an owner: by a copy, by a predicate, or (None) as a private tensor.
Known = Tensor | Callable[[Tensor], bool] | None
RECENT = 16  # additions after which as many recent entries are measured again, as they grow
GROWTH = 16  # assumed bound on an entry's bytes, as a multiple of its owners' bytes
SMALL = 1 << 20  # bytes of owners up to which a new entry is not measured


def cacheable(make: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that its results may be cached; see :func:`cached_result`."""

    @wraps(make)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return cached_result(make, *args, **kwargs)

    return call


def cached_result(make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function whose result is cached, without gradients and outside inference mode, whose
    tensors could not take part in gradients later."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            return make(*args, **kwargs)
    if not torch.is_grad_enabled():
        return make(*args, **kwargs)
    with torch.no_grad():
        return make(*args, **kwargs)


# -- private tensors ------------------------------------------------------------------------------


class _Private:
    """The version of a private tensor, and the object attached to it."""

    __slots__ = ("made", "version")

    def __init__(self, version: int) -> None:
        self.version = version
        self.made: object = None


_private: WeakKeyDictionary[torch.UntypedStorage, _Private] = WeakKeyDictionary()


@cacheable
def private(x: Tensor, is_new: bool = False) -> Tensor:
    """A contiguous copy that only this package holds, which is recognised without comparison.

    Users may see it but must not write to it; a write that torch notices ends its privacy.

    is_new : whether x is contiguous and has no other holder, so that x itself becomes private
        unless it was made in inference mode
    """
    in_place = is_new and not x.is_inference()
    copy = x if in_place else x.detach().clone(memory_format=torch.contiguous_format)
    _private[copy.untyped_storage()] = _Private(copy._version)
    return copy


def is_private(x: Tensor) -> bool:
    """Whether x lies in the memory of a :func:`private` tensor that has not been written to."""
    entry = _private.get(x.untyped_storage())
    return entry is not None and not x.is_inference() and entry.version == x._version


def attach(x: Tensor, made: object) -> None:
    """Attach an object to a private tensor, for its lifetime; it must not refer to the tensor."""
    _private[x.untyped_storage()].made = made


def attached(x: Tensor) -> Any:
    """The object attached to a private tensor, or None."""
    try:
        entry = _private.get(x.untyped_storage())
    except (RuntimeError, NotImplementedError):  # one without memory
        return None
    return None if entry is None or not is_private(x) else entry.made


# -- objects kept with a pattern ------------------------------------------------------------------


class Deriving:
    """A pattern that keeps objects derived from it. Safe to use from several threads."""

    def __init__(self) -> None:
        self.made: dict[Hashable, object] = {}
        self._lock = threading.RLock()

    def derived(self: D, kind: Hashable, make: Callable[[D], T]) -> T:
        """An object that another module derives from the pattern once; must not refer to it.

        Parameters
        ----------
        kind : hashable
            The key of the object.
        make : callable
            Derives it from this pattern.

        Returns
        -------
        object
        """
        result = self.made.get(kind)
        if result is None:
            with self._lock:
                if kind not in self.made:
                    self.made[kind] = make(self)
                result = self.made[kind]
        return cast(T, result)


# -- objects kept for tensors ----------------------------------------------------------------------


class _Entry:
    """A cached object, its bytes, copies of its owners, checks that these are unchanged, and their
    storages."""

    __slots__ = ("checks", "copies", "made", "owners", "size")

    def __init__(
        self, made: object, copies: Sequence[Known], owners: Sequence[object], size: int
    ) -> None:
        self.made, self.copies, self.owners = made, copies, owners
        self.checks = [*map(_check_of, copies)]
        self.size = 2 * size if size <= SMALL else self.measured()

    def measured(self) -> int:
        """The cache's current bytes, including copies and objects attached to tensors."""
        return measured((self.made, self.copies), attached)


class Cache:
    """An LRU cache bounded by number of entries and by bytes.

    An entry has owners, the tensors that it was derived from. It keeps copies of them to compare
    with, not the tensors: it is dropped when one of their storages is freed. Safe to use from
    several threads.
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
        """The object kept for a key and tensors with their current contents, or None.

        count : whether to count a missing one as a miss
        """
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
        """The result of :meth:`find`, or else of :meth:`keep`."""
        cached = self.find(key, *owners)
        return self.keep(key, make, *owners) if cached is None else cached

    def keep(self, key: Hashable, make: Callable[..., T], *owners: Tensor) -> T:
        """Make an object from private copies of tensors and keep it for these, of any size."""
        copies = [private(x) for x in owners]
        result = cached_result(make, *copies)
        compared = [None if is_private(x) else copy for x, copy in zip(owners, copies, strict=True)]
        self.put(key, result, owners, compared)
        return result

    def remember(self, key: Hashable, make: Callable[[], T], *owners: Tensor) -> T:
        """Keep an object as :meth:`keep` does, for a `make` that reads the tensors itself."""
        copies = [None if is_private(x) else private(x) for x in owners]
        result = cached_result(make)
        self.put(key, result, owners, copies)
        return result

    def put(
        self, key: object, made: object, owners: Sequence[Tensor], copies: Sequence[Known]
    ) -> None:
        """Keep an object for tensors, replacing the previous one; copies : to recognise them by."""
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
        """Drop one entry; may run in any thread, whenever a tensor is freed."""
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self.bytes -= entry.size
        return entry  # which is freed without the lock

    def limit(self, entries: int | None, bytes: int | None) -> None:
        """Set limits and drop entries beyond them, except the most recently used one."""
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
        """The most recently used keys, `count` of them or all."""
        while True:
            try:
                return list(itertools.islice(reversed(self._entries), count))
            except RuntimeError:  # garbage was collected meanwhile, and with it an owner
                continue

    def measure(self) -> int:
        """The current bytes of all entries."""
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


# Patterns of tensors, and objects that any module derives from them.
kept = Cache(max_entries=512, max_bytes=4 << 30)


def memory_key(x: Tensor) -> Hashable:
    """The location of a tensor in memory and its layout; for an empty tensor, its storage."""
    place = x.data_ptr() or x.untyped_storage()._cdata
    return place, x.shape, x.stride(), x.dtype


def _check_of(copy: Known) -> Callable[[Tensor], bool]:
    """The predicate for whether an owner is unchanged."""
    if copy is None:
        return is_private
    if not isinstance(copy, Tensor):
        return copy
    compare = _memcmp()
    if compare is None or not copy.is_cpu or copy.is_floating_point():
        return lambda x: torch.equal(x, copy)
    place, size = copy.data_ptr(), copy.nbytes

    def unchanged(x: Tensor) -> bool:
        if x.is_neg() or not x.is_contiguous():
            return torch.equal(x, copy)
        return compare(x.data_ptr(), place, size) == 0

    return unchanged


def same(x: Tensor, y: Tensor) -> bool:
    """Whether tensors of one shape and type are equal (NaN equals nothing); y : contiguous."""
    return _check_of(y)(x)


@cache
def _memcmp() -> Callable[[int, int, int], int] | None:
    """`memcmp` of libc: `torch.equal` takes several times as long on a small graph, and on a large
    one waits for other threads, which may be busy."""
    try:
        memcmp: Any = ctypes.CDLL(None).memcmp
    except (OSError, TypeError, AttributeError):
        return None
    memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    return memcmp


def measured(thing: object, carried: Callable[[Tensor], object] | None = None) -> int:
    """Bytes of all arrays reachable from an object, each piece of memory once.

    Follows containers and objects of sparsetir, except kernels, which are shared.

    carried : returns the object attached to a tensor, which counts, too
    """
    sizes: dict[int, int] = {}
    seen: set[int] = set()
    left = [thing]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        memory = _memory(one)
        if memory is None:
            left += _parts(one)
        else:
            address, size = memory
            sizes[address] = max(size, sizes.get(address, 0))
            if carried is not None and isinstance(one, Tensor):
                left.append(carried(one))
    return sum(sizes.values())


def _memory(array: object) -> tuple[int, int] | None:
    """The address and bytes of the memory an array keeps alive; None for other objects."""
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
    """The members of a container, or of an object of sparsetir."""
    if isinstance(thing, Plan):  # its other attributes hold no arrays
        yield from (thing._args, thing._stored, thing._computed)
        return
    if isinstance(thing, Mapping):
        yield from list(thing.values())
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from list(thing)
    if type(thing).__module__.startswith("sparsetir.") and not isinstance(thing, Kernel):
        yield from list(getattr(thing, "__dict__", {}).values())
