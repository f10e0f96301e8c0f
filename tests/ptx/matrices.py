"""Matrices that the lanes of a warp hold together, by the PTX manual's layouts of fragments.

`mma` of m16n8k8, m16n8k16 and m16n8k32: with group = lane / 4 and place = lane % 4 a register of A
holds, of rows group and group + 8 by turns, neighbouring columns from place on; a register of B
neighbouring rows of column group; C and D two neighbouring columns of these rows.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx.arithmetic import KINDS, from_bfloat16
from ptx.instructions import Made, makes
from ptx.memory import PtxError

if TYPE_CHECKING:
    from ptx.machine import Lanes, Run, Step

Array = Any  # of NumPy
LANE = np.arange(32)
GROUP, PLACE = LANE // 4, LANE % 4
FACTORS = {"f16": np.float16, "bf16": np.uint16, "s8": np.int8, "u8": np.uint8}


def places_of_a(depth: int, per: int) -> tuple[Array, Array]:
    """(row, column of A) by lane, register and element; `per` elements are in a register."""
    register, element = np.indices((depth // (2 * per), per))
    row = GROUP[:, None, None] + 8 * (register % 2)
    return row, PLACE[:, None, None] * per + element + register // 2 * 4 * per


def places_of_b(depth: int, per: int) -> tuple[Array, Array]:
    """(row, column of B) by lane, register and element."""
    register, element = np.indices((depth // (4 * per), per))
    row = PLACE[:, None, None] * per + element + register * 4 * per
    return row, np.broadcast_to(GROUP[:, None, None], row.shape)


def places_of_c() -> tuple[Array, Array]:
    """(row, column of C and D) by lane and register."""
    register = np.arange(4)
    return GROUP[:, None] + 8 * (register // 2), PLACE[:, None] * 2 + register % 2


def numbers(registers: Array, kind: str) -> Array:
    """The elements of registers of 32 bits [.., register], along a new axis, exact."""
    elements = np.ascontiguousarray(registers)[..., None].view(FACTORS[kind])
    if kind == "bf16":
        return from_bfloat16(elements).astype(np.float64)
    return elements.astype(np.int64 if kind in ("s8", "u8") else np.float64)


@makes("mma")
def _multiply(op: Made) -> Step:
    parts = op.statement.opcode.split(".")
    match = re.fullmatch(
        r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col(\.satfinite)?\.(\w+)\.(\w+)\.(\w+)\.(\w+)",
        op.statement.opcode,
    )
    if match is None or match[3] != match[6] or match[4] not in FACTORS or "satfinite" in parts:
        raise PtxError(f"not known: {op.statement}")
    depth, total, kinds = int(match[1]), match[3], (match[4], match[5])
    per = 4 // np.dtype(FACTORS[kinds[0]]).itemsize
    word = KINDS["b32"]
    groups = [op.registers(operand) for operand in op.operands]
    if [len(g) for g in groups[1:3]] != [depth // (2 * per), depth // (4 * per)]:
        raise PtxError(f"not known: {op.statement}")
    factors = [op.sources(*group, kind=word) for group in groups[1:3]]
    halves = total == "f16"  # two sums in a register
    added = op.sources(*groups[3], kind=word)
    targets = [op.target(register, word) for register in groups[0]]
    if len(targets) != (2 if halves else 4):
        raise PtxError(f"not known: {op.statement}")
    places, number = (places_of_a(depth, per), places_of_b(depth, per)), KINDS[total].number

    def run_it(run: Run, lanes: Lanes) -> None:
        count = run.whole_warps(lanes, "mma.sync")
        if run.launch.cost is not None:
            run.launch.counts["tensor operations"] += count * 2 * 16 * 8 * depth

        def fragment(registers: list[Array]) -> Array:
            return np.stack([r.reshape(count, 32) for r in registers], -1)

        matrices = []
        for source, kind, place, shape in zip(
            factors, kinds, places, ((16, depth), (depth, 8)), strict=True
        ):
            elements = numbers(fragment(source(run, lanes)), kind)
            matrix = np.zeros((count, *shape), elements.dtype)
            matrix[:, place[0], place[1]] = elements
            matrices.append(matrix)
        row, column = places_of_c()
        before = np.ascontiguousarray(fragment(added(run, lanes))).view(number)
        after = (np.matmul(*matrices)[:, row, column] + before).astype(number)
        bits = np.ascontiguousarray(after).view(np.uint32)
        for k, target in enumerate(targets):
            target(run, lanes, np.ascontiguousarray(bits[..., k]).reshape(-1))

    return run_it


@makes("ldmatrix")
def _load_matrices(op: Made) -> Step:
    """Lanes 8 n to 8 n + 7 give the addresses of the rows of matrix n."""
    op.allow("sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared_cta")
    if op.kinds != ["b16"]:
        raise PtxError(f"not known: {op.statement}")
    targets = [op.target(r, KINDS["b32"]) for r in op.registers(op.operands[0])]
    if len(targets) != int(op.one_of("x1", "x2", "x4")[1:]):
        raise PtxError(f"not known: {op.statement}")
    address = op.address(op.operands[1])
    op.accesses("shared", 16)
    row, column = np.broadcast_to(GROUP[:, None], (32, 2)), 2 * PLACE[:, None] + np.arange(2)
    if op.has("trans"):
        row, column = column, row

    def run_it(run: Run, lanes: Lanes) -> None:
        count = run.whole_warps(lanes, "ldmatrix")
        gives = (lanes.ids & 31) < 8 * len(targets)
        rows = run.load("shared", address(run, lanes)[gives], lanes.where(gives), np.uint32, 4)
        halves = np.stack(rows, -1).view(np.uint16).reshape(count, len(targets), 8, 8)
        for k, target in enumerate(targets):
            pair = np.ascontiguousarray(halves[:, k, row, column])
            target(run, lanes, pair.view(np.uint32).reshape(-1))

    return run_it


@makes("wmma")
def _whole_matrices(op: Made) -> Step:
    """Matrices of 16 x 16; which lane holds what is not said: here l does 8 l to 8 l + 7, by rows.

    Registers of halves beyond the first four hold them again.
    """
    word, form = KINDS["b32"], r"wmma\.{}\.sync\.aligned\.{}\.m16n16k16(\.\w+)?\.f(16|32)"
    if re.fullmatch(form.format("mma", "(row|col)\\.(row|col)"), op.statement.opcode):
        groups = [op.registers(operand) for operand in op.operands]
        of_a, of_b = (op.sources(*group[:4], kind=word) for group in groups[1:3])
        of_c = op.sources(*groups[3], kind=word)
        targets = [op.target(register, word) for register in groups[0]]
        if op.kinds != ["f32", "f32"] or len(targets) != 8:
            raise PtxError(f"not known: {op.statement}")

        def multiply(run: Run, lanes: Lanes) -> None:
            count = run.whole_warps(lanes, "wmma.mma")
            a, b, c = (
                np.stack(source(run, lanes), -1).view(kind).reshape(count, 16, 16).astype(float)
                for source, kind in ((of_a, np.float16), (of_b, np.float16), (of_c, np.float32))
            )
            sums = (a @ b + c).astype(np.float32).view(np.uint32).reshape(-1, 8)
            for k, target in enumerate(targets):
                target(run, lanes, sums[:, k])

        return multiply
    match = re.fullmatch(form.format(r"(load|store)\.[abcd]", "(row|col)"), op.statement.opcode)
    if match is None:
        raise PtxError(f"not known: {op.statement}")
    stores, bits, size = match[1] == "store", KINDS[f"b{match[4]}"].bits, int(match[4]) // 8
    registers = op.registers(op.operands[1 if stores else 0])
    address, stride = op.address(op.operands[0 if stores else 1]), op.source(op.operands[2], word)
    sources, targets = op.sources(*registers, kind=word), [op.target(r, word) for r in registers]
    op.accesses(op.space, size)

    def run_it(run: Run, lanes: Lanes) -> None:
        run.whole_warps(lanes, op.statement.opcode)
        place = 8 * (lanes.ids[:, None] & 31) + np.arange(8)
        step, beside = divmod(place, 16) if match[2] == "row" else divmod(place, 16)[::-1]
        offsets = (step * stride(run, lanes)[:, None].astype(np.int64) + beside) * size
        places = (address(run, lanes)[:, None] + offsets).T
        if stores:
            held = np.stack(sources(run, lanes), -1).view(bits)
            for k, at in enumerate(places):
                run.store(op.space, at, lanes, [np.ascontiguousarray(held[:, k])])
            return
        loaded = [run.load(op.space, at, lanes, bits, 1)[0] for at in places]
        held = np.stack(loaded, -1).view(np.uint32)
        for k, target in enumerate(targets):
            target(run, lanes, np.ascontiguousarray(held[:, k % held.shape[1]]))

    return run_it
