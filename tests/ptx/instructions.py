"""What each instruction does: a maker for each opcode gives a step of a run.

A maker gets a :class:`Made`: the kernel, the opcode's modifiers and the operands; it refuses
modifiers that it does not know, so that nothing is run as if it were something else.
"""

from __future__ import annotations

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
    made = Made(kernel, statement)
    maker = MAKERS.get(made.name)
    if maker is None:
        raise PtxError(f"not known: {statement}")
    return maker(made)


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
        found = [m for m in self.modifiers if m in modifiers]
        if len(found) != 1:
            raise PtxError(f"not known: {self.statement}")
        return found[0]

    @property
    def kind(self) -> Kind:
        """Its last type, which operands have."""
        return KINDS[self.kinds[-1]]

    @property
    def space(self) -> str:
        """The memory space that it names, or "generic"."""
        return next((m for m in self.modifiers if m in SPACES), "generic")

    def registers(self, operand: str) -> list[str]:
        """Those of `{..}`, or the one that is written; "_" for none."""
        return [o.strip() for o in split(operand.strip("{} "))]

    def source(self, operand: str, kind: Kind | None = None) -> Callable[[Run, Lanes], Array]:
        """What gives the numbers of an operand for lanes, by default in the instruction's type."""
        kind = kind or self.kind
        if operand.startswith("!"):
            inner = self.source(operand[1:].strip(), kind)
            return lambda run, lanes: ~inner(run, lanes)
        if operand in self.kernel.text.registers:
            is_predicate = self.kernel.text.registers[operand] == "pred"
            if is_predicate != (kind.number is np.bool_):
                raise PtxError(f"a predicate and a number: {self.statement}")

            def read(run: Run, lanes: Lanes) -> Array:
                bits = lanes.of(run.registers[operand])
                return kind.decode(bits if bits.dtype == kind.bits else bits.astype(kind.bits))

            return read
        if SPECIAL.fullmatch(operand):
            return lambda run, lanes: lanes.of(run.special[operand]).astype(kind.number)
        if NUMBER.fullmatch(operand):
            value = a.immediate(operand, kind)
            return lambda run, lanes: np.broadcast_to(value, (len(lanes.ids), *value.shape[1:]))
        if operand.startswith("%"):
            raise PtxError(f"not known: register {operand}")
        return lambda run, lanes: np.full(len(lanes.ids), run.symbol(operand), kind.number)

    def sources(self, *operands: str, kind: Kind | None = None) -> Callable[..., list[Array]]:
        """What gives the numbers of several operands."""
        found = [self.source(operand, kind) for operand in operands]
        return lambda run, lanes: [source(run, lanes) for source in found]

    def target(self, operand: str, kind: Kind | None = None) -> Callable[[Run, Lanes, Array], None]:
        """What writes numbers, by default in the instruction's type, to a register."""
        kind = kind or self.kind
        if operand == "_":
            return lambda run, lanes, value: None
        declared = self.kernel.text.registers.get(operand)
        if declared is None or (declared == "pred") != (kind.number is np.bool_):
            raise PtxError(f"not known: {self.statement}")
        register = KINDS[declared].bits

        def write(run: Run, lanes: Lanes, value: Array) -> None:
            lanes.put(run.registers[operand], a.extended(kind.encode(value), kind, register))

        return write

    def address(self, operand: str) -> Callable[[Run, Lanes], Array]:
        """What gives the addresses `[base + offset]`, as int64; those of 32 bits wrap around."""
        match = re.fullmatch(r"\[\s*([^\s+\]-]+)\s*(?:([+-])\s*(-?\w+))?\s*\]", operand)
        if match is None:
            raise PtxError(f"not known: address {operand}")
        base, sign, offset = match.groups()
        shift = int(offset, 0) * (-1 if sign == "-" else 1) if offset else 0
        narrow = self.kernel.text.registers.get(base) in ("b32", "u32", "s32")
        source = self.source(base, KINDS["u32" if narrow else "s64"])

        def addresses(run: Run, lanes: Lanes) -> Array:
            found = source(run, lanes).astype(np.int64) + shift
            return found & 0xFFFFFFFF if narrow else found

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


def computed(made: Made, function: Callable[..., Array]) -> Step:
    """The step of an instruction whose operands and result have its type."""
    sources, target = made.sources(*made.operands[1:]), made.target(made.operands[0])
    return lambda run, lanes: target(run, lanes, function(*sources(run, lanes)))


# --- arithmetic ------------------------------------------------------------------------------

# Function and modifiers by opcode.
SIMPLE: dict[str, tuple[Callable[..., Array], tuple[str, ...]]] = {
    "add": (np.add, ("rn",)), "sub": (np.subtract, ("rn",)), "and": (np.bitwise_and, ()),
    "or": (np.bitwise_or, ()), "xor": (np.bitwise_xor, ()), "not": (np.invert, ()),
    "neg": (np.negative, ()), "abs": (np.abs, ()), "sqrt": (np.sqrt, ("rn", "approx")),
    "ex2": (np.exp2, ("approx", "ftz")), "lg2": (np.log2, ("approx",)),
    "rcp": (np.reciprocal, ("rn", "approx")),
    "rsqrt": (lambda x: 1 / np.sqrt(x), ("approx",)),
    "brev": (lambda x: a.of_bits(a.bits_of(x)[..., ::-1], x.dtype), ()),
}  # fmt: skip


@makes(*SIMPLE)
def _simple(made: Made) -> Step:
    function, modifiers = SIMPLE[made.name]
    made.allow(*modifiers)
    return computed(made, function)


@makes("min", "max")
def _extremum(made: Made) -> Step:
    made.allow("NaN")
    floats = np.dtype(made.kind.number).kind == "f" and not made.has("NaN")
    if made.name == "min":
        return computed(made, np.fmin if floats else np.minimum)
    return computed(made, np.fmax if floats else np.maximum)


@makes("div", "rem")
def _quotient(made: Made) -> Step:
    made.allow("rn", "approx", "full")
    if made.name == "rem":
        return computed(made, lambda x, y: x - a.divide(x, y) * y)
    floats = np.dtype(made.kind.number).kind == "f"
    return computed(made, np.divide if floats else a.divide)


@makes("fma")
def _fma(made: Made) -> Step:
    made.allow("rn", "rz", "rm", "rp", "relu")
    fused = a.multiply_add(made.one_of("rn", "rz", "rm", "rp"))
    if made.has("relu"):
        return computed(made, lambda x, y, z: np.maximum(fused(x, y, z), 0))
    return computed(made, fused)


@makes("mul", "mad")
def _product(made: Made) -> Step:
    made.allow("wide", "lo", "hi", "rn")
    product: Callable[..., Array] = np.multiply
    result = made.kind
    if made.has("wide"):
        product = a.wide_product
        result = KINDS[made.kinds[-1][0] + str(2 * int(made.kinds[-1][1:]))]
    elif made.has("hi"):
        product = a.high_product
    factors, target = made.sources(*made.operands[1:3]), made.target(made.operands[0], result)
    if made.name == "mul":
        return lambda run, lanes: target(run, lanes, product(*factors(run, lanes)))
    added = made.source(made.operands[3], result)
    return lambda run, lanes: target(run, lanes, product(*factors(run, lanes)) + added(run, lanes))


@makes("shl", "shr")
def _shift(made: Made) -> Step:
    made.allow()
    function = a.shift_left if made.name == "shl" else a.shift_right
    value, by = made.source(made.operands[1]), made.source(made.operands[2], KINDS["u32"])
    target = made.target(made.operands[0])
    return lambda run, lanes: target(run, lanes, function(value(run, lanes), by(run, lanes)))


@makes("bfind")
def _highest_bit(made: Made) -> Step:
    made.allow("shiftamt")
    bits = KINDS["b" + made.kinds[-1][1:]]
    if made.kinds[-1][0] == "s":
        raise PtxError(f"not known: {made.statement}")
    value, last = made.source(made.operands[1], bits), 8 * np.dtype(bits.bits).itemsize - 1
    target, shift = made.target(made.operands[0], KINDS["s32"]), made.has("shiftamt")

    def run_it(run: Run, lanes: Lanes) -> None:
        found = a.highest_bit(value(run, lanes))
        target(run, lanes, np.where(found < 0, found, last - found) if shift else found)

    return run_it


@makes("bfi")
def _insert_bits(made: Made) -> Step:
    made.allow()
    if made.kinds != ["b32"]:
        raise PtxError(f"not known: {made.statement}")

    def function(bits: Array, into: Array, at: Array, count: Array) -> Array:
        at, count = (np.minimum(x & 255, 32).astype(np.uint64) for x in (at, count))
        mask = ((np.uint64(1) << count) - np.uint64(1)) << at
        moved = bits.astype(np.uint64) << at
        return ((moved & mask) | (into & ~mask)).astype(np.uint32)

    return computed(made, function)


@makes("prmt")
def _permute(made: Made) -> Step:
    made.allow()

    def function(low: Array, high: Array, selector: Array) -> Array:
        data = np.ascontiguousarray(np.stack([low, high], -1)).view(np.uint8).reshape(-1, 8)
        found = np.zeros((len(data), 4), np.uint8)
        for k in range(4):
            nibble = selector >> np.uint32(4 * k) & np.uint32(15)
            byte = data[np.arange(len(data)), nibble & 7]
            found[:, k] = np.where(nibble & 8, np.where(byte & 0x80, 0xFF, 0), byte)
        return found.view(np.uint32).reshape(-1)

    return computed(made, function)


@makes("setp")
def _compare(made: Made) -> Step:
    how, *joined = [m for m in made.modifiers if m != "ftz"]
    if how.removesuffix("u") not in (*a.COMPARISONS, "num", "nan"):
        raise PtxError(f"not known: {made.statement}")
    floats = np.dtype(made.kind.number).kind == "f"
    compare = a.comparison(how, floats)
    values = made.sources(*made.operands[1:3])
    first, _, second = made.operands[0].partition("|")
    target, other = (made.target(t or "_", KINDS["pred"]) for t in (first.strip(), second.strip()))
    join = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
    if len(joined) > 1 or len(made.operands) != 3 + len(joined):
        raise PtxError(f"not known: {made.statement}")
    also = made.source(made.operands[3], KINDS["pred"]) if joined else None

    def run_it(run: Run, lanes: Lanes) -> None:
        found = compare(*values(run, lanes))
        one, two = found, ~found
        if also is not None:
            with_it = also(run, lanes)
            one, two = join[joined[0]](one, with_it), join[joined[0]](two, with_it)
        target(run, lanes, one)
        other(run, lanes, two)

    return run_it


@makes("selp")
def _select(made: Made) -> Step:
    made.allow()
    values, chosen = made.sources(*made.operands[1:3]), made.source(made.operands[3], KINDS["pred"])
    target = made.target(made.operands[0])

    def run_it(run: Run, lanes: Lanes) -> None:
        first, second = values(run, lanes)
        target(run, lanes, np.where(chosen(run, lanes), first, second))

    return run_it


@makes("mov")
def _move(made: Made) -> Step:
    made.allow()
    into, of = made.operands
    kind = made.kind if made.kinds[-1] == "pred" else KINDS["b" + made.kinds[-1][1:].split("x")[0]]
    size = np.dtype(kind.bits).itemsize
    if of.startswith("{"):
        parts = made.registers(of)
        part, target = KINDS[f"b{8 * size // len(parts)}"], made.target(into, kind)
        sources = made.sources(*parts, kind=part)
        return lambda run, lanes: target(
            run, lanes, np.stack(sources(run, lanes), -1).view(kind.bits).reshape(-1)
        )
    source = made.source(of, kind)
    if into.startswith("{"):
        parts = made.registers(into)
        part = KINDS[f"b{8 * size // len(parts)}"]
        targets = [made.target(p, part) for p in parts]

        def unpack(run: Run, lanes: Lanes) -> None:
            value = np.ascontiguousarray(source(run, lanes)).view(part.bits)
            for k, target in enumerate(targets):
                target(run, lanes, value[k :: len(targets)])

        return unpack
    target = made.target(into, kind)
    return lambda run, lanes: target(run, lanes, source(run, lanes))


@makes("cvt")
def _convert(made: Made) -> Step:
    made.allow("rn", "rna", "rz", "sat", "ftz", *a.WHOLE)
    to, of = (KINDS[kind] for kind in made.kinds)
    target = made.target(made.operands[0], to)
    if made.kinds[0] in ("f16x2", "bf16x2"):
        pair = made.sources(*made.operands[1:], kind=of)
        return lambda run, lanes: target(run, lanes, np.stack(pair(run, lanes)[::-1], -1))
    source = made.source(made.operands[1], of)
    return lambda run, lanes: target(
        run, lanes, a.converted(source(run, lanes), to, made.modifiers)
    )


@makes("cvta")
def _to_address(made: Made) -> Step:
    made.allow("to", *SPACES)
    window = WINDOWS[made.one_of(*WINDOWS)] * (-1 if made.has("to") else 1)
    source, target = made.source(made.operands[1], KINDS["s64"]), made.target(made.operands[0])
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
def _load(made: Made) -> Step:
    made.allow(*SPACES, *CACHES, "nc", "v2", "v4", "volatile", "relaxed", "gpu", "cta", "weak")
    space, kind = made.space, made.kind
    if space == "param":
        target, param = made.target(made.operands[0]), made.operands[1].strip("[] ")
        size = np.dtype(kind.bits).itemsize
        if param not in dict(made.kernel.text.params):
            raise PtxError(f"not known: {made.statement}")

        def parameter(run: Run, lanes: Lanes) -> None:
            declared, value = run.launch.values[param]
            number = None if isinstance(value, np.generic) else KINDS[declared].number
            data = np.asarray(value, number).reshape(1).view(np.uint8)
            if len(data) != size:
                raise PtxError(f"expected a parameter of {size} bytes, got {value!r}")
            target(run, lanes, kind.decode(np.repeat(data.view(kind.bits), len(lanes.ids))))

        return parameter
    targets = [made.target(r) for r in made.registers(made.operands[0])]
    address, how = made.address(made.operands[1]), "nc" if made.has("nc") else "read"
    made.accesses(space, np.dtype(kind.bits).itemsize * len(targets))

    def run_it(run: Run, lanes: Lanes) -> None:
        found = run.load(space, address(run, lanes), lanes, kind.bits, len(targets), how)
        for target, bits in zip(targets, found, strict=True):
            target(run, lanes, kind.decode(bits))

    return run_it


@makes("st")
def _store(made: Made) -> Step:
    made.allow(*SPACES, *CACHES, "v2", "v4", "volatile", "relaxed", "gpu", "cta", "weak")
    space, kind, address = made.space, made.kind, made.address(made.operands[0])
    registers = made.registers(made.operands[1])
    values = made.sources(*registers)
    made.accesses(space, np.dtype(kind.bits).itemsize * len(registers))

    def run_it(run: Run, lanes: Lanes) -> None:
        bits = [kind.encode(value) for value in values(run, lanes)]
        run.store(space, address(run, lanes), lanes, bits)

    return run_it


CHANGES: dict[str, Callable[..., Array]] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "exch": lambda old, new: new,
}  # fmt: skip


@makes("atom", "red")
def _atomic(made: Made) -> Step:
    made.allow(*SPACES, *CHANGES, "cas", "relaxed", "gpu", "cta", "noftz", "sys", "v2", "v4")
    operands = made.operands if made.name == "atom" else ["_", *made.operands]
    how, kind, space = made.one_of(*CHANGES, "cas"), made.kind, made.space
    registers = made.registers(operands[2])
    if len(registers) > 1 and made.name == "atom":
        raise PtxError(f"not known: {made.statement}")
    address, values = made.address(operands[1]), made.sources(*registers)
    swapped = made.source(operands[3]) if how == "cas" else None
    target = made.target(operands[0].strip("{} "))
    size = np.dtype(kind.bits).itemsize
    made.accesses(space, size)

    def run_it(run: Run, lanes: Lanes) -> None:
        at, count = address(run, lanes), len(lanes.ids)
        run.launch.counts["atomics"] += count * len(registers)
        new = swapped(run, lanes) if swapped is not None else None
        old = np.zeros((count, *kind.decode(np.zeros(1, kind.bits)).shape[1:]), kind.number)
        for k, value in enumerate(values(run, lanes)):
            for which, data, offset in run.resolved(space, at + k * size, lanes, size, "atomic"):
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
    order = random.permutation(len(cells))
    order = order[np.argsort(cells[order], kind="stable")]
    count, same = np.arange(len(cells)), np.diff(cells[order], prepend=-1) == 0
    turn = count - np.maximum.accumulate(np.where(same, 0, count))
    ends = np.cumsum(np.bincount(turn))[:-1]
    return np.split(order[np.argsort(turn, kind="stable")], ends)


@makes("cp")
def _copy(made: Made) -> Step:
    """Copies that are read at once, and written where they are waited for."""
    made.allow("async", "ca", "cg", "shared", "shared_cta", "global", "commit_group", "wait_group",
               "wait_all", "L2_128B", "L2_256B", "L2_64B")  # fmt: skip
    if not made.has("async"):
        raise PtxError(f"not known: {made.statement}")
    if made.has("commit_group"):

        def commit(run: Run, lanes: Lanes) -> None:
            run.groups[lanes.ids] += 1

        return commit
    if made.has("wait_group") or made.has("wait_all"):
        left = int(made.operands[0]) if made.operands else -1
        return lambda run, lanes: _wait(run, lanes, left)
    size = int(made.operands[2], 0)
    into, of = made.address(made.operands[0]), made.address(made.operands[1])
    given = made.source(made.operands[3], KINDS["u32"]) if len(made.operands) > 3 else None
    made.accesses("shared", size)
    made.accesses("global", size)

    def copy(run: Run, lanes: Lanes) -> None:
        at, source = into(run, lanes), of(run, lanes)
        wanted = given(run, lanes) if given is not None else np.full(len(lanes.ids), size)
        if not np.isin(wanted, (0, size)).all():
            raise PtxError("not known: an asynchronous copy of a part")
        data, some = np.zeros((len(lanes.ids), size // 4), np.uint32), np.flatnonzero(wanted)
        if some.size:
            read = lanes.where(wanted > 0)
            found = run.load("global", source[some], read, np.uint32, size // 4)
            data[some] = np.stack(found, -1)
        nothing = np.full(len(lanes.ids), 0xFFFFFFFF, np.uint32)
        run.store("shared", at, lanes, [nothing] * (size // 4), "copy")
        run.copies.append((lanes.ids.copy(), run.groups[lanes.ids].copy(), at, data))

    return copy


def _wait(run: Run, lanes: Lanes, left: int) -> None:
    """Let copies arrive, but those of the last `left` groups of each lane."""
    from ptx.machine import Lanes as Some

    here = np.zeros(run.count, bool)
    here[lanes.ids] = True
    rest = []
    for ids, groups, at, data in run.copies:
        arrived = here[ids] & (groups < run.groups[ids] - left)
        if arrived.any():
            values = [np.ascontiguousarray(column) for column in data[arrived].T]
            run.store("shared", at[arrived], Some(ids[arrived], False), values, "arrived")
        if not arrived.all():
            rest.append((ids[~arrived], groups[~arrived], at[~arrived], data[~arrived]))
    run.copies = rest


# --- lanes of a warp -------------------------------------------------------------------------


@makes("shfl")
def _shuffle(made: Made) -> Step:
    made.allow("sync", "up", "down", "bfly", "idx")
    mode, word = made.one_of("up", "down", "bfly", "idx"), KINDS["u32"]
    into, _, flag = made.operands[0].partition("|")
    target, other = made.target(into.strip(), word), made.target(flag.strip() or "_", KINDS["pred"])
    sources = made.sources(*made.operands[1:], kind=word)

    def run_it(run: Run, lanes: Lanes) -> None:
        value, by, bounds, mask = sources(run, lanes)
        run.check_mask(lanes, mask, made.statement.opcode)
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
def _vote(made: Made) -> Step:
    made.allow("sync", "ballot", "any", "all")
    how = "active" if made.name == "activemask" else made.one_of("ballot", "any", "all")
    word, result = KINDS["u32"], KINDS["u32" if how in ("ballot", "active") else "pred"]
    target = made.target(made.operands[0], result)
    if how == "active":
        holds, masks = None, None
    else:
        holds = made.source(made.operands[1], KINDS["pred"])
        masks = made.source(made.operands[2], word)

    def run_it(run: Run, lanes: Lanes) -> None:
        own, warp = np.uint32(1) << (lanes.ids & 31).astype(np.uint32), lanes.ids >> 5
        yes = np.zeros(run.count // 32, np.uint32)
        if holds is None or masks is None:
            np.bitwise_or.at(yes, warp, own)
            target(run, lanes, yes[warp])
            return
        mask = masks(run, lanes)
        run.check_mask(lanes, mask, made.statement.opcode)
        here = np.zeros_like(yes)
        np.bitwise_or.at(here, warp, own)
        np.bitwise_or.at(yes, warp, np.where(holds(run, lanes), own, np.uint32(0)))
        found, all_of = yes[warp] & mask, here[warp] & mask
        answers = {
            "ballot": found, "any": found != 0, "all": found == all_of,
        }  # fmt: skip
        target(run, lanes, answers[how])

    return run_it


@makes("bar")
def _warp_barrier(made: Made) -> Step:
    made.allow("warp", "sync")
    if not made.has("warp"):
        raise PtxError(f"not known: {made.statement}")
    masks = made.source(made.operands[0], KINDS["u32"])

    def run_it(run: Run, lanes: Lanes) -> None:
        run.check_mask(lanes, masks(run, lanes), made.statement.opcode)
        run.who.warp_time[lanes.ids] += 1

    return run_it


@makes("membar", "fence")
def _fence(made: Made) -> Step:
    """Orders nothing here: blocks race, whatever they wait for."""
    made.allow("gl", "cta", "sys", "gpu", "sc", "acq_rel")
    return lambda run, lanes: None


# Registers more makers.
from ptx import matrices  # noqa: E402, F401
