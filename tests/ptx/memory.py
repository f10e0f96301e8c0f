"""Buffers of kernels, and records of the threads that touched them: races."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

Array = Any  # of NumPy

# Where generic addresses of shared and local memory begin.
WINDOWS = {"global": 0, "shared": 1 << 60, "local": 1 << 61}
WIDEST = 16  # bytes of an access


class PtxError(Exception):
    """A kernel does what it must not, or uses what is not known here."""


class Buffer:
    """Bytes at an address.

    start, stop : of the bytes that may be touched
    base : an address before them that every type is aligned to, where `bytes` begin
    """

    def __init__(self, name: str, start: int, size: int, element: int, read_only: bool) -> None:
        self.name, self.start, self.stop = name, start, start + size
        self.element, self.read_only = element, read_only
        self.base = start & -WIDEST
        whole = -(-(self.stop - self.base) // WIDEST) * WIDEST
        self.bytes = np.frombuffer(
            (ctypes.c_uint8 * max(whole, 1)).from_address(self.base), np.uint8
        )


class Global:
    """The global memory: buffers that are added to it."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []

    def add(self, name: str, array: np.ndarray, read_only: bool = False) -> int:
        """Let kernels touch a contiguous array of the caller's, and return its address."""
        self.add_at(name, array.ctypes.data, array.nbytes, array.itemsize, read_only)
        return array.ctypes.data

    def add_at(self, name: str, at: int, size: int, element: int, read_only: bool = False) -> None:
        """Let kernels touch bytes at an address; messages count in elements of some bytes."""
        self.buffers.append(Buffer(name, at, size, element, read_only))

    def parts(self, addresses: Array, size: int) -> list[tuple[Array | slice, Buffer]]:
        """Each touched buffer, and which of the addresses lie in it."""
        low, high = int(addresses.min()), int(addresses.max()) + size
        for buffer in self.buffers:
            if buffer.start <= low and high <= buffer.stop:
                return [(slice(None), buffer)]
        left = np.ones(len(addresses), bool)
        touched: list[tuple[Array | slice, Buffer]] = []
        for buffer in self.buffers:
            if buffer.start < high and low < buffer.stop:
                inside = (addresses >= buffer.start) & (addresses + size <= buffer.stop) & left
                if inside.any():
                    touched.append((np.flatnonzero(inside), buffer))
                    left &= ~inside
        if left.any():
            place = int(np.flatnonzero(left)[0])
            raise OutOfBounds(place, self.nearest(int(addresses[place])))
        return touched

    def nearest(self, address: int) -> str:
        """The location of an address, relative to the nearest buffer."""
        by_distance = sorted(
            self.buffers, key=lambda b: max(b.start - address, address - b.stop + 1)
        )
        if not by_distance:
            return f"at {address:#x}, in no buffer"
        buffer = by_distance[0]
        return f"at {address - buffer.start:+} from the begin of {buffer.name}, in no buffer"


class OutOfBounds(Exception):
    """The place of the first address that lies in no buffer, and what to say of it."""


class Epochs(NamedTuple):
    """Threads of an access, and when it is.

    threads : numbers in the launch, 32 neighbours a warp
    block : number of each one's block
    time, warp_time : barriers of its block, and of its warp, that each has passed
    """

    threads: Array
    blocks: Array
    time: Array
    warp_time: Array

    def of(self, places: Array) -> Epochs:
        """Some of them."""
        return Epochs(*(x[places] for x in self))


ONE, WARP, BLOCK, MANY = range(4)  # how far the threads of a record are spread


class _Records:
    """The last threads that touched each granule, and when: one, or several of a kind.

    Accesses that happened before a new one are forgotten: what comes after that one comes after
    them.

    alone : whether each granule is of one block, as in shared memory
    """

    def __init__(self, size: int, alone: bool) -> None:
        self.alone = alone
        self.thread = np.full(size, -1, np.int64)
        self.block = np.full(size, -1, np.int32)
        self.spread = np.zeros(size, np.int8)
        self.time = np.full(size, -1, np.int32)
        self.warp_time = np.zeros(size, np.int32)
        self.some = False  # whether anything is recorded

    def unordered(self, index: Array, by: Epochs) -> Array:
        """Whether no barrier lies between what is recorded at granules and accesses to them."""
        if not self.some:
            return np.zeros(len(index), bool)
        if self.alone:
            unordered = self.time[index] >= by.time
            if not unordered.any():
                return unordered
        thread, spread = self.thread[index], self.spread[index]
        before = (self.block[index] == by.blocks) & (spread < MANY) & (self.time[index] < by.time)
        in_warp = (thread >> 5 == by.threads >> 5) & (spread <= WARP)
        before |= in_warp & (self.warp_time[index] < by.warp_time)
        return (thread >= 0) & ~before & ((thread != by.threads) | (spread > ONE))

    def add(self, index: Array, by: Epochs) -> None:
        """Record accesses, beside those that did not happen before them."""
        self.some = True
        unordered, spread = self.unordered(index, by), np.int8(ONE)
        if unordered.any():
            near = _spread(self.thread[index], self.block[index], by.threads, by.blocks)
            spread = np.where(unordered, np.maximum(self.spread[index], near), ONE)
        self.thread[index], self.block[index], self.spread[index] = by.threads, by.blocks, spread
        self.time[index], self.warp_time[index] = by.time, by.warp_time
        other = self.thread[index]
        twice = np.flatnonzero(other != by.threads)  # lanes of one instruction
        if twice.size:
            same = index[twice]
            level = _spread(other[twice], self.block[same], by.threads[twice], by.blocks[twice])
            np.maximum.at(self.spread, same, level.astype(np.int8))


def _spread(thread: Array, block: Array, other: Array, other_block: Array) -> Array:
    near = np.where(thread >> 5 == other >> 5, WARP, np.where(block == other_block, BLOCK, MANY))
    return np.where(thread == other, ONE, near)


class Race(Exception):
    """The place of an access in its instruction, its granule, the other thread, what that did."""


class Accesses:
    """The threads that touched each granule of some bytes; which are uninitialised.

    granule : bytes of the narrowest access
    known : whether everything holds a value, as in global memory
    """

    def __init__(self, size: int, granule: int, known: bool) -> None:
        count = -(-size // granule)
        self.granule = granule
        self.writes, self.reads, self.atomics = (_Records(count, not known) for _ in range(3))
        self.empty = None if known else np.ones(count, bool)
        self.coming = None if known else np.zeros(count, bool)

    def touch(
        self, first: Array, size: int, how: str, by: Epochs, same: Array | None = None
    ) -> None:
        """Record accesses to `size` bytes from offsets on.

        how : "read", "write" or "atomic"
        same : which write what is there already, and are allowed to

        Raises `Race`.
        """
        index, parts = self.granules(first, size)
        if parts > 1:
            by = by.of(np.repeat(np.arange(len(first)), parts))
            same = None if same is None else np.repeat(same, parts)

        def check(bad: Array, records: _Records, did: str) -> None:
            if bad.any():
                place = int(bad.argmax())
                other = int(records.thread[index[place]])
                raise Race(place // parts, int(index[place]) * self.granule, other, did)

        others = [(self.writes, "wrote")]
        if how != "atomic":
            others.append((self.atomics, "changed by an atomic"))
        if how != "read":
            others.append((self.reads, "read"))
        for records, did in others:
            bad = records.unordered(index, by)
            check(bad & ~same if same is not None and did == "wrote" else bad, records, did)
        records = {"read": self.reads, "write": self.writes, "atomic": self.atomics}[how]
        records.add(index, by)
        if how == "write" and same is None:
            check(records.thread[index] != by.threads, records, "wrote")

    def granules(self, first: Array, size: int) -> tuple[Array, int]:
        """The granules of accesses, and how many each has, which are neighbours."""
        index, parts = first // self.granule, max(1, size // self.granule)
        return ((index[:, None] + np.arange(parts)).reshape(-1) if parts > 1 else index), parts

    def filled(self, first: Array, size: int, how: str) -> None:
        """Note what holds a value now, or is to come ("copy"); raises for reads of none."""
        if self.empty is None or self.coming is None:
            return
        index, _ = self.granules(first, size)
        if how == "copy":
            self.coming[index] = True
            return
        if how != "arrived" and self.coming[index].any():
            raise PtxError(f"{how}s where an asynchronous copy is on its way, not waited for")
        if how in ("read", "atomic"):
            if self.empty[index].any():
                raise PtxError("reads what nobody has written")
            return
        self.empty[index] = False
        if how == "arrived":
            self.coming[index] = False
