"""Kernels made ready to run, and what runs them: all warps of some blocks at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ptx import instructions
from ptx.arithmetic import KINDS
from ptx.counting import Cost
from ptx.memory import WINDOWS, Accesses, Buffer, Epochs, Global, OutOfBounds, PtxError, Race
from ptx.parse import EXIT, Statement, Text, parse, readable
from ptx.warpgroups import Products

Array = Any  # of NumPy
WARP = 32
MOST_BYTES = 200 << 20  # of registers and shared memory at a time
MOST_THREADS = 1 << 16  # at a time
ENDED, WAITING = 1 << 30, (1 << 30) - 1  # in place of a block's number
NOTHING = 0xFF  # bytes without a value: NaN


class Lanes(NamedTuple):
    """Threads that run an instruction, in order.

    ids : their numbers among those that run; whole : whether these are all
    """

    ids: Array
    whole: bool

    def of(self, values: Array) -> Array:
        """The lanes' part of an array over all threads."""
        return values if self.whole else values[self.ids]

    def put(self, values: Array, new: Array) -> None:
        """Write their part of it."""
        values[slice(None) if self.whole else self.ids] = new

    def where(self, condition: Array) -> Lanes:
        """The lanes for which a condition holds."""
        return self if condition.all() else Lanes(self.ids[condition], False)


Step = Callable[["Run", Lanes], None]


class Module:
    """The kernels of a text of PTX, by name."""

    def __init__(self, text: str) -> None:
        self.kernels = {name: Kernel(kernel) for name, kernel in parse(text).items()}

    def __getitem__(self, name: str) -> Kernel:
        return self.kernels[name]


class Kernel:
    """A kernel whose instructions are steps: functions of a run and the lanes that reach them."""

    def __init__(self, text: Text) -> None:
        self.text, self.name = text, text.name
        self.narrowest = {"global": 16, "shared": 16}  # bytes of accesses, told by `instructions`
        self.of_products = set[str]()  # registers of `wgmma`, told by `warpgroups`
        self.steps: list[list[tuple[Statement, Step]]] = [
            [(s, _guarded(instructions.step(self, s), s)) for s in block.statements]
            for block in text.blocks
        ]

    def launch(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        values: Sequence[Any],
        memory: Global,
        dynamic: int = 0,
        *,
        races: bool = True,
        equal: bool = False,
        seed: int = 0,
        cost: bool = False,
    ) -> Counter[str]:
        """Run all blocks; the number of "barriers" of blocks, "shuffles" and "atomics" of lanes.

        values : addresses and numbers, of NumPy or of a parameter's type, in order
        dynamic : bytes of dynamic shared memory
        races : whether races are looked for; equal : but for threads that write the same value
        seed : of the order of blocks and of atomics
        cost : whether to count what `counting` says, too

        Raises `PtxError`.
        """
        if min(*grid, *block) < 1:
            raise PtxError(f"launched with a grid {tuple(grid)} of blocks {tuple(block)}")
        if len(values) != len(self.text.params):
            raise PtxError(f"expected {len(self.text.params)} values, got {len(values)}")
        launch = Launch(self, grid, block, values, memory, dynamic, races, equal, seed)
        launch.cost = Cost(launch.counts) if cost else None
        blocks = np.arange(launch.blocks)
        if seed:
            launch.random.shuffle(blocks)
        for start in range(0, launch.blocks, launch.at_a_time):
            with np.errstate(all="ignore"):
                Run(launch, np.sort(blocks[start : start + launch.at_a_time])).run()
        return launch.counts


def _guarded(step: Step, statement: Statement) -> Step:
    if not statement.guard:
        return step

    def run(run: Run, lanes: Lanes) -> None:
        lanes = lanes.where(lanes.of(run.registers[statement.guard]) != statement.negated)
        if lanes.ids.size:
            step(run, lanes)

    return run


class Launch:
    """The state that all blocks of a launch share."""

    def __init__(
        self, kernel: Kernel, grid: Sequence[int], block: Sequence[int], values: Sequence[Any],
        memory: Global, dynamic: int, races: bool, equal: bool, seed: int,
    ) -> None:  # fmt: skip
        self.kernel, self.grid, self.block, self.memory = kernel, grid, block, memory
        self.races, self.equal, self.dynamic = races, equal, dynamic
        self.random = np.random.default_rng(seed)
        self.counts: Counter[str] = Counter()
        self.cost: Cost | None = None
        self.blocks = int(np.prod(grid, dtype=np.int64))
        self.threads = int(np.prod(block))
        self.per_block = -(-self.threads // WARP) * WARP
        text = kernel.text
        named = zip(text.params, values, strict=True)
        self.values = {name: (kind, value) for (name, kind), value in named}
        align = max([128, *text.dynamic.values()])
        self.dynamic_at = -(-text.shared.size // align) * align
        self.shared_size = self.dynamic_at + -(-dynamic // 16) * 16 + 16
        self.inside = {
            "shared": text.shared.inside(self.shared_size),
            "local": text.local.inside(text.local.size + 1),
        }
        self.inside["shared"][self.dynamic_at : self.dynamic_at + dynamic] = True
        registers = sum(np.dtype(KINDS[kind].bits).itemsize for kind in text.registers.values())
        size = (registers + text.local.size) * self.per_block + 8 * self.shared_size
        most = min(MOST_BYTES // max(size, 1), MOST_THREADS // self.per_block)
        self.at_a_time = max(1, min(most, self.blocks))
        granule = kernel.narrowest["global"]
        self.touched = {
            id(b): Accesses(b.stop - b.base, granule, known=True)
            for b in memory.buffers
            if races and not b.read_only
        }
        self.ways: dict[int, set[str]] = {id(b): set() for b in memory.buffers}


class Run:
    """Some blocks of a launch: the registers of their threads, their shared and local memory."""

    def __init__(self, launch: Launch, blocks: Array) -> None:
        self.launch, self.kernel = launch, launch.kernel
        text, per = launch.kernel.text, launch.per_block
        self.count = count = len(blocks) * per
        self.everyone = np.arange(count)
        place, block = np.tile(np.arange(per), len(blocks)), np.repeat(blocks, per)
        self.block_of = np.repeat(np.arange(len(blocks)), per)
        self.epochs = Epochs(
            block * per + place, block.astype(np.int32), np.zeros(count, np.int32),
            np.zeros(count, np.int32),
        )  # fmt: skip
        self.special = _special(launch, place, block)
        self.registers: dict[str, Array] = {}
        for kind in set(text.registers.values()):
            names = [name for name, of in text.registers.items() if of == kind]
            bits = KINDS[kind].bits
            self.registers.update(zip(names, np.full((len(names), count), ~bits(0), bits)))
        self.shared = np.full(len(blocks) * launch.shared_size, NOTHING, np.uint8)
        self.local = np.full(count * -(-text.local.size // 16) * 16, NOTHING, np.uint8)
        granule = self.kernel.narrowest["shared"]
        self.touched = Accesses(len(self.shared), granule, known=False)
        self.at = np.where(place < launch.threads, 0, ENDED)
        self.after = np.zeros(count, np.int64)
        self.groups = np.zeros(count, np.int64)  # of asynchronous copies, that each has closed
        self.copies: list[tuple[Array, Array, Array, Array]] = []
        self.products = Products(self) if self.kernel.of_products else None

    def run(self) -> None:
        """Run all threads until they have ended."""
        blocks, steps = self.kernel.text.blocks, self.kernel.steps
        while True:
            now = int(self.at.min())
            if now == ENDED:
                return
            if now == WAITING:
                self._release()
                continue
            (ids,) = (self.at == now).nonzero()
            lanes = Lanes(ids, len(ids) == self.count)
            if self.launch.cost is not None:
                self.launch.cost.issued(blocks[now], ids)
            for statement, step in steps[now]:
                try:
                    step(self, lanes)
                except PtxError as error:
                    raise PtxError(f"{error}\n  {statement}") from None
            self._leave(blocks[now], lanes)

    def _leave(self, block: Any, lanes: Lanes) -> None:
        """Send lanes to what follows a basic block."""
        end, follows = block.end, _place(block.follows)
        if end is None:
            lanes.put(self.at, follows)
        elif end.opcode.startswith(("bar", "barrier")):
            if end.guard or [o.strip() for o in end.operands] != ["0"]:
                raise PtxError(f"not known: {end}")
            lanes.put(self.after, follows)
            lanes.put(self.at, WAITING)
        else:
            taken = _place(block.taken) if end.opcode.startswith("bra") else ENDED
            if end.guard:
                condition = lanes.of(self.registers[end.guard]) != end.negated
                lanes.put(self.at, np.where(condition, taken, follows))
            else:
                lanes.put(self.at, taken)

    def _release(self) -> None:
        """Let blocks leave a barrier, which all of their threads must have reached."""
        table = self.at.reshape(-1, self.launch.per_block)
        after = self.after.reshape(table.shape)
        waiting = table == WAITING
        real = np.arange(self.launch.per_block) < self.launch.threads
        left = waiting.any(1, keepdims=True) & ~waiting & real
        if left.any():
            thread = int(np.flatnonzero(left.reshape(-1))[0])
            raise PtxError(f"a barrier that {self.told(self.epochs.threads[thread])} ended without")
        first = after[np.arange(len(table)), waiting.argmax(1)][:, None]
        apart = waiting & (after != first)
        if apart.any():
            thread = int(np.flatnonzero(apart.reshape(-1))[0])
            raise PtxError(
                f"a barrier while {self.told(self.epochs.threads[thread])} is at another one"
            )
        self.launch.counts["barriers"] += int(waiting.any(1).sum())
        self.epochs.time[waiting.reshape(-1)] += 1
        table[waiting] = after[waiting]

    def told(self, thread: Any) -> str:
        """A thread of the launch, for people."""
        block, place = divmod(int(thread), self.launch.per_block)
        x, y, _ = self.launch.block
        return f"block {block}, thread ({place % x}, {place // x % y}, {place // x // y})"

    # --- memory ------------------------------------------------------------------------------

    def symbol(self, name: str) -> int:
        """The address of an array in its space."""
        text = self.kernel.text
        if name in text.dynamic:
            return self.launch.dynamic_at
        for arrays in (text.shared, text.local):
            if name in arrays.places:
                return arrays.places[name]
        raise PtxError(f"not known: symbol {name}")

    def load(
        self, space: str, address: Array, lanes: Lanes, bits: Any, count: int, how: str = "read"
    ) -> list[Array]:
        """Neighbouring numbers at the address of each lane, as bits; how : or "nc"."""
        size = np.dtype(bits).itemsize
        words = [np.zeros(len(lanes.ids), bits) for _ in range(count)]
        for which, data, offset in self.resolved(space, address, lanes, size * count, how):
            view, first = data.view(bits), offset // size
            for k in range(count):
                words[k][which] = view[first + k]
        return words

    def store(
        self, space: str, address: Array, lanes: Lanes, values: Sequence[Array], how: str = "write"
    ) -> None:
        """Write neighbouring numbers, as bits, to the address of each lane."""
        bits = values[0].dtype
        size = bits.itemsize
        wide = [np.broadcast_to(value, len(lanes.ids)) for value in values]
        resolved = self.resolved(space, address, lanes, size * len(wide), how, wide)
        for which, data, offset in resolved:
            view, first = data.view(bits), offset // size
            for k, value in enumerate(wide):
                view[first + k] = value[which]
                if self.launch.equal and not (view[first + k] == value[which]).all():
                    raise PtxError("race: threads write an element, with another value each")

    def resolved(
        self, space: str, address: Array, lanes: Lanes, size: int, how: str,
        values: Sequence[Array] = (),
    ) -> list[tuple[Array | slice, Array, Array]]:  # fmt: skip
        """(which lanes, bytes, offsets in them) of each memory touched, after all checks."""
        if space == "generic":
            parts = []
            for name, window in WINDOWS.items():
                which = np.flatnonzero(address >> 60 == window >> 60)
                if which.size:
                    some = Lanes(lanes.ids[which], False)
                    part = [value[which] for value in values]
                    inner = self.resolved(name, address[which] - window, some, size, how, part)
                    parts += [(which[places], data, offset) for places, data, offset in inner]
            return parts
        (crooked,) = (address & (size - 1)).nonzero()
        if crooked.size:
            place = int(crooked[0])
            raise PtxError(
                f"misaligned: {self._says(lanes, place, how, size)} at {int(address[place]):#x} of "
                f"{space} memory"
            )
        if space == "global":
            return self._global(address, lanes, size, how, values)
        inside = self.launch.inside[space]  # the last byte is not
        ends = inside.take(address, mode="clip") & inside.take(address + size - 1, mode="clip")
        (outside,) = ((address < 0) | ~ends).nonzero()
        if outside.size:
            place = int(outside[0])
            raise PtxError(
                f"out of bounds: {self._says(lanes, place, how, size)} at {int(address[place])} of "
                f"{space} memory, in no array"
            )
        every = slice(None)
        if space == "local":
            rows = len(self.local) // self.count
            return [(every, self.local, address + lanes.ids * rows)]
        offset = address + self.block_of[lanes.ids] * self.launch.shared_size
        self.touched.filled(offset, size, how)
        if self.products is not None:
            self.products.in_shared(offset, size, how, lanes)
        if self.launch.cost is not None and how != "arrived":
            self.launch.cost.in_shared(address, lanes.ids, size)
        plain = "write" if how in ("copy", "arrived") else how
        if self.launch.races:  # a copy may write from where it begins to where it is waited for
            self.raced(self.touched, offset, lanes, size, plain, self.shared, values)
        return [(every, self.shared, offset)]

    def _global(
        self, address: Array, lanes: Lanes, size: int, how: str, values: Sequence[Array]
    ) -> list[tuple[Array | slice, Array, Array]]:
        try:
            parts = self.launch.memory.parts(address, size)
        except OutOfBounds as error:
            place, where = error.args
            raise PtxError(
                f"out of bounds: {self._says(lanes, place, how, size)} {where}"
            ) from None
        pieces = []
        for which, buffer in parts:
            if buffer.read_only and how in ("write", "atomic"):
                raise PtxError(f"{buffer.name} may only be read: {how}")
            ways = self.launch.ways[id(buffer)]
            ways.add(how)
            if "nc" in ways and ways & {"write", "atomic"}:
                raise PtxError(f"{buffer.name} is read by ld.global.nc, and written")
            offset = address[which] - buffer.base
            if self.launch.cost is not None:
                self.launch.cost.in_global(address[which], lanes.ids[which], how, buffer)
            accesses = self.launch.touched.get(id(buffer))
            if accesses is not None and how != "nc":
                some = Lanes(lanes.ids[which], False)
                part = [value[which] for value in values]
                self.raced(accesses, offset, some, size, how, buffer.bytes, part, buffer)
            pieces.append((which, buffer.bytes, offset))
        return pieces

    def raced(
        self, accesses: Accesses, offset: Array, lanes: Lanes, size: int, how: str, data: Array,
        values: Sequence[Array], buffer: Buffer | None = None,
    ) -> None:  # fmt: skip
        """Record accesses; raises for a race."""
        same = None
        if self.launch.equal and how == "write" and len(values):
            first, bits = offset // values[0].itemsize, values[0].dtype
            stored = data.view(bits)
            same = np.logical_and.reduce([stored[first + k] == v for k, v in enumerate(values)])
        try:
            accesses.touch(offset, size, how, self.epochs.of(lanes.ids), same)
        except Race as race:
            place, byte, other, did = race.args
            raise PtxError(
                f"race: {self._says(lanes, place, how)} {self._element(byte, buffer)}, which "
                f"{self.told(other)} {did}, with no barrier between them"
            ) from None

    def _says(self, lanes: Lanes, place: int, how: str, size: int = 0) -> str:
        does = {"write": "writes", "atomic": "changes by an atomic", "copy": "copies to"}
        lane = f"{self.told(self.epochs.threads[lanes.ids[place]])} {does.get(how, 'reads')}"
        return f"{lane} {size} bytes" if size else lane

    def _element(self, byte: int, buffer: Buffer | None) -> str:
        """An element of a buffer, or the place in an array in shared memory."""
        if buffer is not None:
            return f"{buffer.name}[{(byte + buffer.base - buffer.start) // buffer.element}]"
        byte %= self.launch.shared_size
        shared = self.kernel.text.shared
        for name, start in shared.places.items():
            if start <= byte < start + shared.sizes[name]:
                return f"{readable(name)}[byte {byte - start}]"
        return f"dynamic shared memory[byte {byte - self.launch.dynamic_at}]"

    # --- warps -------------------------------------------------------------------------------

    def check_mask(self, lanes: Lanes, mask: Array, name: str) -> None:
        """Raise where a mask names lanes that neither come nor have ended, or not the lane."""
        warp = lanes.ids >> 5
        bit = np.uint32(1) << (lanes.ids & 31).astype(np.uint32)
        if (mask & bit == 0).any():
            raise PtxError(f"{name}: the mask does not name the lane itself")
        here = np.zeros(self.count // WARP, np.uint32)
        np.bitwise_or.at(here, warp, bit)
        powers = np.uint32(1) << np.arange(WARP, dtype=np.uint32)
        ended = (self.at.reshape(-1, WARP) == ENDED) @ powers.astype(np.uint64)
        missing = np.flatnonzero(mask & ~(here | ended.astype(np.uint32))[warp])
        if missing.size:
            lane = self.told(self.epochs.threads[lanes.ids[int(missing[0])]])
            raise PtxError(f"{name} of {lane}: lanes of its mask do not come")

    def whole_warps(self, lanes: Lanes, name: str) -> int:
        """The number of warps that come; raises where lanes of one do not."""
        ids = lanes.ids
        if len(ids) % WARP or (ids.reshape(-1, WARP)[:, 0] % WARP).any() or (
            ids[WARP - 1 :: WARP] - ids[::WARP] != WARP - 1
        ).any():  # fmt: skip
            raise PtxError(f"{name}: lanes of a warp do not come")
        return len(ids) // WARP


def _place(block: int) -> int:
    return ENDED if block == EXIT else block


def _special(launch: Launch, place: Array, block: Array) -> dict[str, Array]:
    """Special registers, of each thread."""
    registers = {"%laneid": place % WARP, "%warpid": place // WARP}
    for name, number, sizes in (("tid", place, launch.block), ("ctaid", block, launch.grid)):
        for letter, size in zip("xyz", sizes, strict=True):
            registers[f"%{name}.{letter}"] = number % size
            registers[f"%n{name}.{letter}"] = np.full(len(place), size)
            number = number // size
    return {name: values.astype(np.uint32) for name, values in registers.items()}
