"""Products of four warps, which read matrices in shared memory on their own time: `wgmma`.

By the PTX manual's "Asynchronous Warpgroup Level Matrix Instructions", for factors of 16 bits and
sums in float32; matrices in shared memory have its canonical layouts, in chunks of 16 bytes.

A product is computed where it is issued, and until it is waited for it is an error to touch what it
uses. `PtxError` is raised for

- registers of sums and factors that are read or written before the wait,
- registers that other instructions have read or written after the last `wgmma.fence`,
- shared memory that was written by ordinary instructions or `cp.async` of a thread that has run no
  `fence.proxy.async` since (the manual also allows that of the reader, after a barrier),
- shared memory that is written while a product reads it, or after that without a barrier,
- descriptors that differ in a warpgroup, or whose pattern of swizzles is not aligned.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ptx.arithmetic import KINDS
from ptx.instructions import Made, makes
from ptx.matrices import GROUP, PLACE, numbers, places_of_a
from ptx.memory import PtxError

if TYPE_CHECKING:
    from ptx.machine import Lanes, Run, Step

Array = Any  # of NumPy
THREADS, DEPTH, CHUNK = 128, 16, 16  # of a warpgroup; terms of a product; bytes
SWIZZLES = (1, 8, 4, 2)  # chunks, by the descriptor's bits


class Flight(NamedTuple):
    """A product of a warpgroup under way.

    ids : its threads; group : the number of its group; registers : of sums and factors
    offsets, granules : the chunks of shared memory that it reads, by thread over and over
    """

    ids: Array
    group: int
    registers: list[str]
    offsets: Array
    granules: Array


class Products:
    """The products of a run that are under way, and what they use.

    using : the number of products that use a register, by thread
    accessed : whether others have read or written it after the thread's last fence
    reading : the number of products that read a granule of shared memory
    writer : the thread whose write to a granule products do not see yet, or -1
    groups : the number of groups that each thread has committed
    """

    def __init__(self, run: Run) -> None:
        names, granules = run.kernel.of_products, len(run.touched.reads.thread)
        self.run, self.flights = run, list[Flight]()
        self.using, self.accessed = (
            {name: np.zeros(run.count, np.int32) for name in names} for _ in range(2)
        )
        self.reading, self.writer = np.zeros(granules, np.int32), np.full(granules, -1)
        self.groups = np.zeros(run.count, np.int64)

    def in_register(self, register: str, lanes: Lanes, how: str) -> None:
        """Note an access to a register; none may be while a product uses it."""
        if register in self.using:
            if self.using[register][lanes.ids].any():
                raise PtxError(f"{how} {register}, which a wgmma uses that is not waited for")
            self.accessed[register][lanes.ids] = True

    def in_shared(self, offset: Array, size: int, how: str, lanes: Lanes) -> None:
        """Note an access to shared memory; no product may read what is written."""
        if how == "read":
            return
        index, parts = self.run.touched.granules(offset, size)
        if self.reading[index].any():
            raise PtxError("writes where a wgmma reads that is not waited for")
        if how != "copy":
            self.writer[index] = np.repeat(lanes.ids, parts)

    def show(self, lanes: Lanes) -> None:
        """Let products see what lanes have written to shared memory."""
        self.writer[np.isin(self.writer, lanes.ids)] = -1

    def start(self, flight: Flight) -> None:
        """Note a product under way."""
        for name in flight.registers:
            if self.accessed[name][flight.ids].any():
                raise PtxError(f"wgmma uses {name}, which was used after the last wgmma.fence")
        if (self.writer[flight.granules] >= 0).any():
            raise PtxError("wgmma reads what a thread wrote that has no fence.proxy.async since")
        self.flights.append(flight)
        self._count(flight, 1)

    def _count(self, flight: Flight, by: int) -> None:
        for name in flight.registers:
            self.using[name][flight.ids] += by
        np.add.at(self.reading, flight.granules, by)

    def wait(self, lanes: Lanes, left: int) -> None:
        """End products, but those of the last `left` groups of each lane."""
        run, some = self.run, [x for x in self.flights if x.ids[0] in lanes.ids]
        for flight in [x for x in some if x.group < self.groups[x.ids[0]] - left]:
            self.flights.remove(flight)
            self._count(flight, -1)
            if run.launch.races:  # it may have read just now
                by = type(lanes)(np.resize(flight.ids, len(flight.offsets)), False)
                run.raced(run.touched, flight.offsets, by, CHUNK, "read", run.shared, ())


def chunks(descriptor: int, mn: int, by_mn: bool) -> Array:
    """The addresses of a matrix's chunks: by half of the sum and row, or by chunk and term."""
    start, lead, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    w = SWIZZLES[descriptor >> 62]
    if descriptor >> 49 & 7 or (w > 1 and start >> 4 & 7 * w & ~(w - 1)):
        raise PtxError(f"misaligned: a pattern of {16 * w} bytes, in a matrix at {start}")
    near, far = np.indices((mn // 8, DEPTH) if by_mn else (2, mn))
    if w > 1:
        address = near // w * lead + near % w * 16 if by_mn else near * 16
    else:
        address = near * (stride if by_mn else lead)
    address += start + far // 8 * (lead if by_mn and w == 1 else stride) + far % 8 * 16 * w
    return address ^ (address >> 7 & (w - 1)) << 4


def _warpgroups(run: Run, lanes: Lanes) -> Array:
    """The threads of each warpgroup that comes; raises where some of one do not."""
    if len(lanes.ids) % THREADS == 0:
        groups = lanes.ids.reshape(-1, THREADS)
        whole = (groups == groups[:, :1] + np.arange(THREADS)).all()
        if whole and not (groups[:, 0] % run.launch.per_block % THREADS).any():
            return groups
    raise PtxError("wgmma: threads of a warpgroup do not come")


@makes("wgmma")
def _by_warpgroup(op: Made) -> Step:
    if op.has("mma_async"):
        return _product(op)
    how = op.one_of("fence", "commit_group", "wait_group")
    op.allow(how, "sync", "aligned")
    left = int(op.operands[0]) if how == "wait_group" else 0

    def run_it(run: Run, lanes: Lanes) -> None:
        _warpgroups(run, lanes)
        if run.products is None:
            return
        if how == "wait_group":
            run.products.wait(lanes, left)
        elif how == "commit_group":
            run.products.groups[lanes.ids] += 1
        else:
            for accessed in run.products.accessed.values():
                accessed[lanes.ids] = False

    return run_it


def _product(op: Made) -> Step:
    form = r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(b?f16)\.\2"
    match = re.fullmatch(form, op.statement.opcode)
    if match is None:
        raise PtxError(f"not known: {op.statement}")
    parts = [op.registers(operand) for operand in op.operands]
    in_registers = len(parts[1]) == 4
    width, kind, sums = int(match[1]), match[2], parts[0]
    if width % 8 or len(parts) != 8 - in_registers or len(sums) != width // 2:
        raise PtxError(f"not known: {op.statement}")
    signs = int(op.operands[4]) * int(op.operands[5])
    by_mn = [operand == "1" for operand in op.operands[6:]]
    of_a, of_b = (op.source(operand, KINDS["b64"]) for operand in (parts[1][0], op.operands[2]))
    adds = op.source(op.operands[3], KINDS["pred"])
    used = sums + parts[1] * in_registers
    op.kernel.of_products.update(used)
    op.accesses("shared", CHUNK)
    place, number = np.arange(width // 2), KINDS["f32"].number
    row = np.arange(4)[:, None, None] * 16 + GROUP[:, None] + place // 2 % 2 * 8
    column = np.broadcast_to(place // 4 * 8 + PLACE[:, None] * 2 + place % 2, row.shape)

    def run_it(run: Run, lanes: Lanes) -> None:
        groups, read = _warpgroups(run, lanes), list[Array]()
        count, products = len(groups), run.products
        assert products is not None

        def in_shared(descriptors: Array, mn: int, by_mn: bool) -> Array:
            each = descriptors.reshape(groups.shape)
            if (each != each[:, :1]).any():
                raise PtxError("wgmma: descriptors differ in a warpgroup")
            places = np.stack([chunks(int(d), mn, by_mn) for d in each[:, 0]])
            flat, words = places.reshape(count, -1).astype(np.int64), list[Array]()
            for begin in range(0, flat.shape[1], THREADS):
                at = flat[:, begin : begin + THREADS]
                ids = groups[:, : at.shape[1]]
                by = type(lanes)(ids.reshape(-1), False)
                loaded = run.load("shared", at.reshape(-1), by, np.uint32, 4)
                words.append(np.stack(loaded, -1).reshape(count, -1, 4))
                read.append(at + run.block_of[ids] * run.launch.shared_size)
            matrix = numbers(np.concatenate(words, 1), kind).reshape(*places.shape, 8)
            order = (0, 1, 3, 2) if by_mn else (0, 2, 1, 3)
            return matrix.transpose(order).reshape(count, mn, DEPTH)

        def registers(names: list[str]) -> Array:
            return np.stack([lanes.of(run.registers[name]) for name in names], -1)

        if in_registers:
            words = registers(parts[1]).reshape(count, 4, 32, 4)
            a = np.zeros((count, 4, 16, DEPTH))
            a[(slice(None), slice(None), *places_of_a(DEPTH, 2))] = numbers(words, kind)
            a = a.reshape(count, 64, DEPTH)
        else:
            a = in_shared(of_a(run, lanes), 64, by_mn[0])
        b = in_shared(of_b(run, lanes), width, by_mn[-1])
        before = registers(sums).view(number)
        before = np.where(adds(run, lanes)[:, None], before, 0).reshape(count, *row.shape)
        after = (signs * a @ b.transpose(0, 2, 1))[:, row, column] + before
        bits = after.astype(number).reshape(-1, width // 2).view(np.uint32)
        for ids, at in zip(groups, np.concatenate(read, 1), strict=True):
            group, (granules, _) = int(products.groups[ids[0]]), run.touched.granules(at, CHUNK)
            products.start(Flight(ids, group, used, at, granules))
        for k, name in enumerate(sums):
            lanes.put(run.registers[name], bits[:, k])
        if run.launch.cost is not None:
            run.launch.counts["tensor operations"] += count * 2 * 64 * width * DEPTH

    return run_it
