"""Instructions: a maker for each opcode returns a step of a run.

A maker gets a :class:`Made`: the kernel, the opcode's modifiers and the operands; it refuses
modifiers that it does not know, so that nothing is run as if it were something else.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx import arithmetic as a
from ptx.arithmetic import KINDS, Kind
from ptx.memory import WINDOWS, PtxError
from ptx.parse import Statement, split

if TYPE_CHECKING:
    from ptx.machine import Kernel, Lanes, Run, Step

Array = Any  # of NumPy
MAKERS: dict[str, Callable[[Made], Step]] = {}
SPACES = ("global", "shared", "local", "param")
SPECIAL = re.compile(r"%(n?(tid|ctaid)\.[xyz]|laneid|warpid)")
NUMBER = re.compile(r"-?(0[fFdD][0-9a-fA-F]+|\d\w*)")


def step(kernel: Kernel, statement: Statement) -> Step:
    """The step of an instruction; raises `PtxError` for what is not known."""
    op = Made(kernel, statement)
    maker = MAKERS.get(op.name)
    if maker is None:
        raise PtxError(f"not known: {statement}")
    return maker(op)


class Made:
    """An instruction that is made ready.

    name, modifiers : parts of the opcode, without types
    kinds : its types, in order
    operands : as they are written
    """

    def __init__(self, kernel: Kernel, statement: Statement) -> None:
        self.kernel, self.statement = kernel, statement
        self.name, *parts = statement.opcode.replace("::", "_").split(".")
        self.kinds = [part for part in parts if part in KINDS]
        self.modifiers = [part for part in parts if part not in KINDS]
        self.operands = list(statement.operands)

    def allow(self, *modifiers: str) -> None:
        """Refuse modifiers but these."""
        if set(self.modifiers) - set(modifiers):
            raise PtxError(f"not known: {self.statement}")

    def has(self, modifier: str) -> bool:
        """Whether the opcode has a modifier."""
        return modifier in self.modifiers

    def one_of(self, *modifiers: str) -> str:
        """The one of these that it has."""
        present = [m for m in self.modifiers if m in modifiers]
        if len(present) != 1:
            raise PtxError(f"not known: {self.statement}")
        return present[0]

    @property
    def kind(self) -> Kind:
        """The last type, which operands have."""
        return KINDS[self.kinds[-1]]

    @property
    def space(self) -> str:
        """The memory space that it names, or "generic"."""
        return next((m for m in self.modifiers if m in SPACES), "generic")

    def registers(self, operand: str) -> list[str]:
        """Registers of `{..}`, or the single one; "_" for none."""
        return [o.strip() for o in split(operand.strip("{} "))]

    def source(self, operand: str, kind: Kind | None = None) -> Callable[[Run, Lanes], Array]:
        """A function giving an operand's numbers for lanes, by default in the opcode's type."""
        kind = kind or self.kind
        if operand.startswith("!"):
            inner = self.source(operand[1:].strip(), kind)
            return lambda run, lanes: ~inner(run, lanes)
        if operand in self.kernel.text.registers:
            is_predicate = self.kernel.text.registers[operand] == "pred"
            if is_predicate != (kind.number is np.bool_):
                raise PtxError(f"a predicate and a number: {self.statement}")

            def read(run: Run, lanes: Lanes) -> Array:
                if run.products is not None:
                    run.products.in_register(operand, lanes, "reads")
                bits = lanes.of(run.registers[operand])
                return kind.decode(bits if bits.dtype == kind.bits else bits.astype(kind.bits))

            return read
        if SPECIAL.fullmatch(operand):
            return lambda run, lanes: lanes.of(run.special[operand]).astype(kind.number)
        if NUMBER.fullmatch(operand):
            value = a.immediate(operand, kind)
            of_all = functools.cache(
                lambda count: np.broadcast_to(value, (count, *value.shape[1:]))
            )
            return lambda run, lanes: of_all(len(lanes.ids))
        if operand.startswith("%"):
            raise PtxError(f"not known: register {operand}")
        return lambda run, lanes: np.full(len(lanes.ids), run.symbol(operand), kind.number)

    def sources(self, *operands: str, kind: Kind | None = None) -> Callable[..., list[Array]]:
        """A function that gives the numbers of several operands."""
        readers = [self.source(operand, kind) for operand in operands]
        return lambda run, lanes: [source(run, lanes) for source in readers]

    def target(self, operand: str, kind: Kind | None = None) -> Callable[[Run, Lanes, Array], None]:
        """A function that writes numbers to a register, by default in the instruction's type."""
        kind = kind or self.kind
        if operand == "_":
            return lambda run, lanes, value: None
        declared = self.kernel.text.registers.get(operand)
        if declared is None or (declared == "pred") != (kind.number is np.bool_):
            raise PtxError(f"not known: {self.statement}")
        register = KINDS[declared].bits

        def write(run: Run, lanes: Lanes, value: Array) -> None:
            if run.products is not None:
                run.products.in_register(operand, lanes, "writes")
            lanes.put(run.registers[operand], a.extended(kind.encode(value), kind, register))

        return write

    def address(self, operand: str) -> Callable[[Run, Lanes], Array]:
        """A function giving addresses `[base + offset]`, as int64; those of 32 bits wrap around."""
        match = re.fullmatch(r"\[\s*([^\s+\]-]+)\s*(?:([+-])\s*(-?\w+))?\s*\]", operand)
        if match is None:
            raise PtxError(f"not known: address {operand}")
        base, sign, offset = match.groups()
        shift = int(offset, 0) * (-1 if sign == "-" else 1) if offset else 0
        narrow = self.kernel.text.registers.get(base) in ("b32", "u32", "s32")
        source = self.source(base, KINDS["u32" if narrow else "s64"])

        def addresses(run: Run, lanes: Lanes) -> Array:
            sums = source(run, lanes).astype(np.int64) + shift
            return sums & 0xFFFFFFFF if narrow else sums

        return addresses

    def accesses(self, space: str, size: int) -> None:
        """Tell the kernel how narrow accesses are."""
        for name in ("global", "shared") if space == "generic" else (space,):
            if name in self.kernel.narrowest:
                self.kernel.narrowest[name] = min(self.kernel.narrowest[name], size)


def makes(*names: str) -> Callable[[Callable[[Made], Step]], Callable[[Made], Step]]:
    """The decorator of a maker for opcodes."""

    def register(maker: Callable[[Made], Step]) -> Callable[[Made], Step]:
        MAKERS.update(dict.fromkeys(names, maker))
        return maker

    return register


def computed(op: Made, function: Callable[..., Array]) -> Step:
    """The step of an instruction whose operands and result have its type."""
    sources, target = op.sources(*op.operands[1:]), op.target(op.operands[0])
    return lambda run, lanes: target(run, lanes, function(*sources(run, lanes)))


# --- arithmetic ------------------------------------------------------------------------------

# Function and modifiers by opcode.
SIMPLE: dict[str, tuple[Callable[..., Array], tuple[str, ...]]] = {
    "add": (np.add, ("rn",)), "sub": (np.subtract, ("rn",)), "and": (np.bitwise_and, ()),
    "or": (np.bitwise_or, ()), "xor": (np.bitwise_xor, ()), "not": (np.invert, ()),
    "neg": (np.negative, ()), "abs": (np.abs, ()), "sqrt": (np.sqrt, ("rn", "approx")),
    "ex2": (np.exp2, ("approx", "ftz")), "lg2": (np.log2, ("approx",)),
    "rcp": (np.reciprocal, ("rn", "approx", "ftz")),
    "rsqrt": (lambda x: 1 / np.sqrt(x), ("approx",)),
    "brev": (lambda x: a.from_bits(a.bits_of(x)[..., ::-1], x.dtype), ()),
}  # fmt: skip


@makes(*SIMPLE)
def _simple(op: Made) -> Step:
    function, modifiers = SIMPLE[op.name]
    op.allow(*modifiers)
    return computed(op, function)


@makes("min", "max")
def _extremum(op: Made) -> Step:
    op.allow("NaN")
    floats = np.dtype(op.kind.number).kind == "f" and not op.has("NaN")
    if op.name == "min":
        return computed(op, np.fmin if floats else np.minimum)
    return computed(op, np.fmax if floats else np.maximum)


@makes("div", "rem")
def _quotient(op: Made) -> Step:
    op.allow("rn", "approx", "full")
    if op.name == "rem":
        return computed(op, lambda x, y: x - a.divide(x, y) * y)
    floats = np.dtype(op.kind.number).kind == "f"
    return computed(op, np.divide if floats else a.divide)


@makes("fma")
def _fma(op: Made) -> Step:
    op.allow("rn", "rz", "rm", "rp", "relu")
    fused = a.multiply_add(op.one_of("rn", "rz", "rm", "rp"))
    if op.has("relu"):
        return computed(op, lambda x, y, z: np.maximum(fused(x, y, z), 0))
    return computed(op, fused)


@makes("mul", "mad")
def _product(op: Made) -> Step:
    op.allow("wide", "lo", "hi", "rn")
    product: Callable[..., Array] = np.multiply
    result = op.kind
    if op.has("wide"):
        product = a.wide_product
        result = KINDS[op.kinds[-1][0] + str(2 * int(op.kinds[-1][1:]))]
    elif op.has("hi"):
        product = a.high_product
    factors, target = op.sources(*op.operands[1:3]), op.target(op.operands[0], result)
    if op.name == "mul":
        return lambda run, lanes: target(run, lanes, product(*factors(run, lanes)))
    added = op.source(op.operands[3], result)
    return lambda run, lanes: target(run, lanes, product(*factors(run, lanes)) + added(run, lanes))


@makes("dp2a")
def _product_of_halves(op: Made) -> Step:
    """The sum of two halves times two bytes, and a number."""
    op.allow("lo", "hi")
    if op.kinds != ["u32", "u32"]:
        raise PtxError(f"not known: {op.statement}")
    first = np.uint32(16 if op.one_of("lo", "hi") == "hi" else 0)

    def function(halves: Array, factors: Array, added: Array) -> Array:
        low, high = factors >> first & 255, factors >> (first + 8) & 255
        return (halves & 0xFFFF) * low + (halves >> 16) * high + added

    return computed(op, function)


@makes("shl", "shr")
def _shift(op: Made) -> Step:
    op.allow()
    function = a.shift_left if op.name == "shl" else a.shift_right
    value, by = op.source(op.operands[1]), op.source(op.operands[2], KINDS["u32"])
    target = op.target(op.operands[0])
    return lambda run, lanes: target(run, lanes, function(value(run, lanes), by(run, lanes)))


@makes("bfind")
def _highest_bit(op: Made) -> Step:
    op.allow("shiftamt")
    bits = KINDS["b" + op.kinds[-1][1:]]
    if op.kinds[-1][0] == "s":
        raise PtxError(f"not known: {op.statement}")
    value, last = op.source(op.operands[1], bits), 8 * np.dtype(bits.bits).itemsize - 1
    target, shift = op.target(op.operands[0], KINDS["s32"]), op.has("shiftamt")

    def run_it(run: Run, lanes: Lanes) -> None:
        bit = a.highest_bit(value(run, lanes))
        target(run, lanes, np.where(bit < 0, bit, last - bit) if shift else bit)

    return run_it


@makes("bfi")
def _insert_bits(op: Made) -> Step:
    op.allow()
    if op.kinds != ["b32"]:
        raise PtxError(f"not known: {op.statement}")

    def function(bits: Array, into: Array, start: Array, count: Array) -> Array:
        start, count = (np.minimum(x & 255, 32).astype(np.uint64) for x in (start, count))
        mask = ((np.uint64(1) << count) - np.uint64(1)) << start
        moved = bits.astype(np.uint64) << start
        return ((moved & mask) | (into & ~mask)).astype(np.uint32)

    return computed(op, function)


@makes("prmt")
def _permute(op: Made) -> Step:
    op.allow()

    def function(low: Array, high: Array, selector: Array) -> Array:
        data = np.ascontiguousarray(np.stack([low, high], -1)).view(np.uint8).reshape(-1, 8)
        chosen = np.zeros((len(data), 4), np.uint8)
        for k in range(4):
            nibble = selector >> np.uint32(4 * k) & np.uint32(15)
            byte = data[np.arange(len(data)), nibble & 7]
            chosen[:, k] = np.where(nibble & 8, np.where(byte & 0x80, 0xFF, 0), byte)
        return chosen.view(np.uint32).reshape(-1)

    return computed(op, function)


@makes("setp")
def _compare(op: Made) -> Step:
    how, *joined = [m for m in op.modifiers if m != "ftz"]
    if how.removesuffix("u") not in (*a.COMPARISONS, "num", "nan"):
        raise PtxError(f"not known: {op.statement}")
    floats = np.dtype(op.kind.number).kind == "f"
    compare = a.comparison(how, floats)
    values = op.sources(*op.operands[1:3])
    first, _, second = op.operands[0].partition("|")
    target, other = (op.target(t or "_", KINDS["pred"]) for t in (first.strip(), second.strip()))
    join = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
    if len(joined) > 1 or len(op.operands) != 3 + len(joined):
        raise PtxError(f"not known: {op.statement}")
    also = op.source(op.operands[3], KINDS["pred"]) if joined else None

    def run_it(run: Run, lanes: Lanes) -> None:
        holds = compare(*values(run, lanes))
        one, two = holds, ~holds
        if also is not None:
            with_it = also(run, lanes)
            one, two = join[joined[0]](one, with_it), join[joined[0]](two, with_it)
        target(run, lanes, one)
        other(run, lanes, two)

    return run_it


@makes("set")
def _compare_to_number(op: Made) -> Step:
    """1, or all bits of an integer, where a comparison holds."""
    how, *more = [m for m in op.modifiers if m != "ftz"]
    to, of = (KINDS[kind] for kind in op.kinds)
    floats = np.dtype(of.number).kind == "f"
    if more or how.removesuffix("u" if floats else "") not in (*a.COMPARISONS, "num", "nan"):
        raise PtxError(f"not known: {op.statement}")
    compare, values = a.comparison(how, floats), op.sources(*op.operands[1:], kind=of)
    target, holds = op.target(op.operands[0], to), 1 if np.dtype(to.number).kind == "f" else -1
    return lambda run, lanes: target(
        run, lanes, (compare(*values(run, lanes)) * np.int64(holds)).astype(to.number)
    )


@makes("selp")
def _select(op: Made) -> Step:
    op.allow()
    values, chosen = op.sources(*op.operands[1:3]), op.source(op.operands[3], KINDS["pred"])
    target = op.target(op.operands[0])

    def run_it(run: Run, lanes: Lanes) -> None:
        first, second = values(run, lanes)
        target(run, lanes, np.where(chosen(run, lanes), first, second))

    return run_it


@makes("mov")
def _move(op: Made) -> Step:
    op.allow()
    into, of = op.operands
    kind = op.kind if op.kinds[-1] == "pred" else KINDS["b" + op.kinds[-1][1:].split("x")[0]]
    size = np.dtype(kind.bits).itemsize
    if of.startswith("{"):
        parts = op.registers(of)
        part, target = KINDS[f"b{8 * size // len(parts)}"], op.target(into, kind)
        sources = op.sources(*parts, kind=part)
        return lambda run, lanes: target(
            run, lanes, np.stack(sources(run, lanes), -1).view(kind.bits).reshape(-1)
        )
    source = op.source(of, kind)
    if into.startswith("{"):
        parts = op.registers(into)
        part = KINDS[f"b{8 * size // len(parts)}"]
        targets = [op.target(p, part) for p in parts]

        def unpack(run: Run, lanes: Lanes) -> None:
            value = np.ascontiguousarray(source(run, lanes)).view(part.bits)
            for k, target in enumerate(targets):
                target(run, lanes, value[k :: len(targets)])

        return unpack
    target = op.target(into, kind)
    return lambda run, lanes: target(run, lanes, source(run, lanes))


@makes("cvt")
def _convert(op: Made) -> Step:
    op.allow("rn", "rna", "rz", "sat", "ftz", *a.WHOLE)
    to, of = (KINDS[kind] for kind in op.kinds)
    target = op.target(op.operands[0], to)
    if op.kinds[0] in ("f16x2", "bf16x2"):
        pair = op.sources(*op.operands[1:], kind=of)
        return lambda run, lanes: target(run, lanes, np.stack(pair(run, lanes)[::-1], -1))
    source = op.source(op.operands[1], of)
    return lambda run, lanes: target(run, lanes, a.converted(source(run, lanes), to, op.modifiers))


@makes("cvta")
def _to_address(op: Made) -> Step:
    op.allow("to", *SPACES)
    window = WINDOWS[op.one_of(*WINDOWS)] * (-1 if op.has("to") else 1)
    source, target = op.source(op.operands[1], KINDS["s64"]), op.target(op.operands[0])
    return lambda run, lanes: target(
        run, lanes, (source(run, lanes) + np.int64(window)).view(np.uint64)
    )


# --- memory ----------------------------------------------------------------------------------

CACHES = (
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "L1_no_allocate",
    "L2_128B",
    "L2_256B",
    "L2_64B",
)


@makes("ld", "ldu")
def _load(op: Made) -> Step:
    op.allow(*SPACES, *CACHES, "nc", "v2", "v4", "volatile", "relaxed", "gpu", "cta", "weak")
    space, kind = op.space, op.kind
    if space == "param":
        target, param = op.target(op.operands[0]), op.operands[1].strip("[] ")
        size = np.dtype(kind.bits).itemsize
        if param not in dict(op.kernel.text.params):
            raise PtxError(f"not known: {op.statement}")

        def parameter(run: Run, lanes: Lanes) -> None:
            declared, value = run.launch.values[param]
            number = None if isinstance(value, np.generic) else KINDS[declared].number
            data = np.asarray(value, number).reshape(1).view(np.uint8)
            if len(data) != size:
                raise PtxError(f"expected a parameter of {size} bytes, got {value!r}")
            target(run, lanes, kind.decode(np.repeat(data.view(kind.bits), len(lanes.ids))))

        return parameter
    targets = [op.target(r) for r in op.registers(op.operands[0])]
    address, how = op.address(op.operands[1]), "nc" if op.has("nc") else "read"
    op.accesses(space, np.dtype(kind.bits).itemsize * len(targets))

    def run_it(run: Run, lanes: Lanes) -> None:
        words = run.load(space, address(run, lanes), lanes, kind.bits, len(targets), how)
        for target, bits in zip(targets, words, strict=True):
            target(run, lanes, kind.decode(bits))

    return run_it


@makes("st")
def _store(op: Made) -> Step:
    op.allow(*SPACES, *CACHES, "v2", "v4", "volatile", "relaxed", "gpu", "cta", "weak")
    space, kind, address = op.space, op.kind, op.address(op.operands[0])
    registers = op.registers(op.operands[1])
    values = op.sources(*registers)
    op.accesses(space, np.dtype(kind.bits).itemsize * len(registers))

    def run_it(run: Run, lanes: Lanes) -> None:
        bits = [kind.encode(value) for value in values(run, lanes)]
        run.store(space, address(run, lanes), lanes, bits)

    return run_it


CHANGES: dict[str, Callable[..., Array]] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "exch": lambda old, new: new,
}  # fmt: skip


@makes("atom", "red")
def _atomic(op: Made) -> Step:
    op.allow(*SPACES, *CHANGES, "cas", "relaxed", "gpu", "cta", "noftz", "sys", "v2", "v4")
    operands = op.operands if op.name == "atom" else ["_", *op.operands]
    how, kind, space = op.one_of(*CHANGES, "cas"), op.kind, op.space
    registers = op.registers(operands[2])
    if len(registers) > 1 and op.name == "atom":
        raise PtxError(f"not known: {op.statement}")
    address, values = op.address(operands[1]), op.sources(*registers)
    swapped = op.source(operands[3]) if how == "cas" else None
    target = op.target(operands[0].strip("{} "))
    size = np.dtype(kind.bits).itemsize
    op.accesses(space, size)

    def run_it(run: Run, lanes: Lanes) -> None:
        where, count = address(run, lanes), len(lanes.ids)
        run.launch.counts["atomics"] += count * len(registers)
        new = swapped(run, lanes) if swapped is not None else None
        old = np.zeros((count, *kind.decode(np.zeros(1, kind.bits)).shape[1:]), kind.number)
        for k, value in enumerate(values(run, lanes)):
            for which, data, offset in run.resolved(space, where + k * size, lanes, size, "atomic"):
                which = np.arange(count)[which]
                view, first = data.view(kind.bits), offset // size
                for turn in _turns(first, run.launch.random):
                    some, cells = which[turn], first[turn]
                    before = old[some] = kind.decode(view[cells])
                    if new is None:
                        after = CHANGES[how](before, value[some])
                    else:
                        after = np.where(before == value[some], new[some], before)
                    view[cells] = kind.encode(after)
        target(run, lanes, old)

    return run_it


def _turns(cells: Array, random: np.random.Generator) -> list[Array]:
    """Places of lanes in turns in which no two change one cell, in a random order."""
    ordered = np.sort(cells)
    if (ordered[1:] != ordered[:-1]).all():
        return [np.arange(len(cells))]
    order = random.permutation(len(cells))
    order = order[np.argsort(cells[order], kind="stable")]
    count, same = np.arange(len(cells)), np.diff(cells[order], prepend=-1) == 0
    turn = count - np.maximum.accumulate(np.where(same, 0, count))
    ends = np.cumsum(np.bincount(turn))[:-1]
    return np.split(order[np.argsort(turn, kind="stable")], ends)


@makes("cp")
def _copy(op: Made) -> Step:
    """Copies that are read at once, and written where they are waited for."""
    op.allow("async", "ca", "cg", "shared", "shared_cta", "global", "commit_group", "wait_group",
               "wait_all", "L2_128B", "L2_256B", "L2_64B")  # fmt: skip
    if not op.has("async"):
        raise PtxError(f"not known: {op.statement}")
    if op.has("commit_group"):

        def commit(run: Run, lanes: Lanes) -> None:
            run.groups[lanes.ids] += 1

        return commit
    if op.has("wait_group") or op.has("wait_all"):
        left = int(op.operands[0]) if op.operands else -1
        return lambda run, lanes: _wait(run, lanes, left)
    size = int(op.operands[2], 0)
    into, of = op.address(op.operands[0]), op.address(op.operands[1])
    count = op.source(op.operands[3], KINDS["u32"]) if len(op.operands) > 3 else None
    op.accesses("shared", size)
    op.accesses("global", size)

    def copy(run: Run, lanes: Lanes) -> None:
        to, source = into(run, lanes), of(run, lanes)
        wanted = count(run, lanes) if count is not None else np.full(len(lanes.ids), size)
        if not np.isin(wanted, (0, size)).all():
            raise PtxError("not known: an asynchronous copy of a part")
        data, some = np.zeros((len(lanes.ids), size // 4), np.uint32), np.flatnonzero(wanted)
        if some.size:
            read = lanes.where(wanted > 0)
            words = run.load("global", source[some], read, np.uint32, size // 4)
            data[some] = np.stack(words, -1)
        nothing = np.full(len(lanes.ids), 0xFFFFFFFF, np.uint32)
        run.store("shared", to, lanes, [nothing] * (size // 4), "copy")
        run.copies.append((lanes.ids.copy(), run.groups[lanes.ids].copy(), to, data))

    return copy


def _wait(run: Run, lanes: Lanes, left: int) -> None:
    """Let copies arrive, but those of the last `left` groups of each lane."""
    from ptx.machine import Lanes as Some

    here = np.zeros(run.count, bool)
    here[lanes.ids] = True
    rest = []
    for ids, groups, to, data in run.copies:
        arrived = here[ids] & (groups < run.groups[ids] - left)
        if arrived.any():
            values = [np.ascontiguousarray(column) for column in data[arrived].T]
            run.store("shared", to[arrived], Some(ids[arrived], False), values, "arrived")
        if not arrived.all():
            rest.append((ids[~arrived], groups[~arrived], to[~arrived], data[~arrived]))
    run.copies = rest


# --- lanes of a warp -------------------------------------------------------------------------


@makes("shfl")
def _shuffle(op: Made) -> Step:
    op.allow("sync", "up", "down", "bfly", "idx")
    mode, word = op.one_of("up", "down", "bfly", "idx"), KINDS["u32"]
    into, _, flag = op.operands[0].partition("|")
    target, other = op.target(into.strip(), word), op.target(flag.strip() or "_", KINDS["pred"])
    sources = op.sources(*op.operands[1:], kind=word)

    def run_it(run: Run, lanes: Lanes) -> None:
        value, by, bounds, mask = sources(run, lanes)
        run.check_mask(lanes, mask, op.statement.opcode)
        run.launch.counts["shuffles"] += len(lanes.ids)
        lane, by = lanes.ids & 31, (by & 31).astype(np.int64)
        segment, clamp = (
            (bounds >> np.uint32(8) & 31).astype(np.int64),
            bounds.astype(np.int64) & 31,
        )
        last = (lane & segment) | (clamp & ~segment)
        if mode == "up":
            source, inside = lane - by, lane - by >= last
        elif mode == "down":
            source, inside = lane + by, lane + by <= last
        elif mode == "bfly":
            source, inside = lane ^ by, lane ^ by <= last
        else:
            source = (lane & segment) | (by & ~segment)
            inside = source <= last
        table = np.full(run.count, 0xFFFFFFFF, np.uint32)
        table[lanes.ids] = value
        target(run, lanes, table[(lanes.ids & ~31) + np.where(inside, source, lane)])
        other(run, lanes, inside)

    return run_it


@makes("vote", "activemask")
def _vote(op: Made) -> Step:
    op.allow("sync", "ballot", "any", "all")
    how = "active" if op.name == "activemask" else op.one_of("ballot", "any", "all")
    word, result = KINDS["u32"], KINDS["u32" if how in ("ballot", "active") else "pred"]
    target = op.target(op.operands[0], result)
    if how == "active":
        holds, masks = None, None
    else:
        holds = op.source(op.operands[1], KINDS["pred"])
        masks = op.source(op.operands[2], word)

    def run_it(run: Run, lanes: Lanes) -> None:
        bit, warp = np.uint32(1) << (lanes.ids & 31).astype(np.uint32), lanes.ids >> 5
        yes = np.zeros(run.count // 32, np.uint32)
        if holds is None or masks is None:
            np.bitwise_or.at(yes, warp, bit)
            target(run, lanes, yes[warp])
            return
        mask = masks(run, lanes)
        run.check_mask(lanes, mask, op.statement.opcode)
        here = np.zeros_like(yes)
        np.bitwise_or.at(here, warp, bit)
        np.bitwise_or.at(yes, warp, np.where(holds(run, lanes), bit, np.uint32(0)))
        votes, all_of = yes[warp] & mask, here[warp] & mask
        answers = {
            "ballot": votes, "any": votes != 0, "all": votes == all_of,
        }  # fmt: skip
        target(run, lanes, answers[how])

    return run_it


@makes("bar")
def _warp_barrier(op: Made) -> Step:
    op.allow("warp", "sync")
    if not op.has("warp"):
        raise PtxError(f"not known: {op.statement}")
    masks = op.source(op.operands[0], KINDS["u32"])

    def run_it(run: Run, lanes: Lanes) -> None:
        mask = masks(run, lanes)
        run.check_mask(lanes, mask, op.statement.opcode)
        if (mask != 0xFFFFFFFF).any():
            raise PtxError("not known: a barrier of some lanes of a warp")
        run.epochs.warp_time[lanes.ids] += 1

    return run_it


@makes("trap")
def _trap(op: Made) -> Step:
    def run_it(run: Run, lanes: Lanes) -> None:
        raise PtxError(f"{run.told(run.epochs.threads[lanes.ids[0]])} is at a trap")

    return run_it


@makes("membar", "fence")
def _fence(op: Made) -> Step:
    """Orders nothing here, blocks race whatever they wait for, except for what `wgmma` reads."""
    op.allow("gl", "cta", "sys", "gpu", "sc", "acq_rel", "proxy", "async", "shared_cta")
    if op.has("proxy"):
        op.one_of("async")
        return lambda run, lanes: run.products and run.products.show(lanes)
    return lambda run, lanes: None


# Registers more makers.
from ptx import matrices, warpgroups  # noqa: E402, F401
