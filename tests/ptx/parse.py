"""PTX as text: kernels with their parameters, registers, arrays and basic blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ptx.arithmetic import KINDS
from ptx.memory import PtxError
from ptx.order import order

EXIT = -1  # the successor of a block after which threads have ended


@dataclass
class Statement:
    """An instruction: its opcode with modifiers, its operands, and the predicate that guards it."""

    opcode: str
    operands: list[str]
    guard: str = ""
    negated: bool = False

    def __str__(self) -> str:
        return f"{self.opcode} {', '.join(self.operands)}"


@dataclass
class Block:
    """A basic block; `end` is a branch, an exit or a barrier, if it is none of these it goes on."""

    statements: list[Statement] = field(default_factory=list)
    end: Statement | None = None
    taken: int = EXIT
    follows: int = EXIT


GAP = 256  # bytes behind each array, which belong to none: who is next to an array's end shows


@dataclass
class Arrays:
    """Arrays of a memory space: the place of each, by name, and the bytes of all."""

    places: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    size: int = 0

    def add(self, name: str, size: int, align: int) -> None:
        """Put an array behind the others."""
        self.places[name] = -(-self.size // align) * align
        self.sizes[name] = size
        self.size = self.places[name] + size + GAP

    def inside(self, size: int) -> np.ndarray:
        """A mask of the first `size` bytes: whether each belongs to an array."""
        inside = np.zeros(size, bool)
        for name, start in self.places.items():
            inside[start : start + self.sizes[name]] = True
        return inside


@dataclass
class Text:
    """A kernel as it is written.

    params : name and type of each; registers : type by name, of inner scopes with a number
    shared, local : arrays; dynamic : alignments of arrays in dynamic shared memory, by name
    blocks : in the order in which they run
    """

    name: str
    params: list[tuple[str, str]]
    shared: Arrays
    dynamic: dict[str, int]
    registers: dict[str, str] = field(default_factory=dict)
    local: Arrays = field(default_factory=Arrays)
    blocks: list[Block] = field(default_factory=lambda: [Block()])


def parse(text: str) -> dict[str, Text]:
    """The kernels of a module by name."""
    text = re.sub(r"//[^\n]*", "", re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL))
    shared, dynamic = Arrays(), dict[str, int]()
    kernels: dict[str, Text] = {}
    outside, begin = "", 0
    for match in re.finditer(r"(?:\.visible\s+)?\.(entry|func)\b", text):
        if match.start() < begin:
            continue
        opening = text.index("{", match.start())
        end = _closing(text, opening)
        outside += text[begin : match.start()]
        begin = end + 1
        if match[1] == "func":
            continue  # a call of it is not known
        head = text[match.start() : opening]
        name = re.search(r"\.entry\s+([\w$]+)", head)
        params = re.findall(r"\.param\s+\.(\w+)[^,)]*?([\w$]+_param_\d+)", head)
        assert name is not None
        kernel = Text(name[1], [(p, kind) for kind, p in params], shared, dynamic)
        _Body(kernel).read(text[opening + 1 : end])
        kernels[kernel.name] = kernel
    for statement in (outside + text[begin:]).split(";"):
        if ".shared" in statement:
            _shared(statement, shared, dynamic)
    return kernels


def _closing(text: str, opening: int) -> int:
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, opening):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.start()
    raise PtxError("a brace is not closed")


ARRAY = re.compile(
    r"(\.extern\s+)?\.(?:shared|local)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?"
)


def _shared(text: str, shared: Arrays, dynamic: dict[str, int]) -> None:
    match = ARRAY.search(text)
    if match is None:
        raise PtxError(f"array {text.strip()}")
    extern, align, kind, name, count = match.groups()
    if extern:
        dynamic[name] = int(align or 1)
        return
    unit = np.dtype(KINDS[kind].bits).itemsize
    shared.add(name, unit * int(count or 1), int(align or unit))


class _Body:
    """Reads the statements of a kernel."""

    def __init__(self, kernel: Text) -> None:
        self.kernel = kernel
        self.labels: dict[str, int] = {}
        self.scopes: list[dict[str, str]] = [{}]
        self.number = 0

    def read(self, body: str) -> None:
        blocks = self.kernel.blocks
        for kind, text in _pieces(body):
            if kind == "open":
                self.number += 1
                self.scopes.append({})
            elif kind == "close":
                self.scopes.pop()
            elif kind == "label":
                self._next()
                self.labels[text] = len(blocks) - 1
            elif text.startswith(".reg"):
                self._registers(text)
            elif text.startswith((".shared", ".extern")):
                _shared(text, self.kernel.shared, self.kernel.dynamic)
            elif text.startswith(".local"):
                _shared(text, self.kernel.local, {})
            elif not text.startswith((".pragma", ".loc")):
                self._instruction(text)
        self._link()

    def _next(self) -> None:
        if self.kernel.blocks[-1].statements or self.kernel.blocks[-1].end:
            self.kernel.blocks.append(Block())

    def _registers(self, text: str) -> None:
        kind, names = text.removeprefix(".reg").lstrip(" .").split(None, 1)
        for name in map(str.strip, names.split(",")):
            many = re.fullmatch(r"(.*)<(\d+)>", name)
            for one in [f"{many[1]}{n}" for n in range(int(many[2]))] if many else [name]:
                unique = one if len(self.scopes) == 1 else f"{one}.{self.number}"
                self.scopes[-1][one] = unique
                self.kernel.registers[unique] = kind

    def _instruction(self, text: str) -> None:
        guard, negated = "", False
        if text.startswith("@"):
            mark, text = text.split(None, 1)
            negated, guard = mark.startswith("@!"), self._named(mark.lstrip("@!"))
        opcode, *rest = text.split(None, 1)
        operands = [self._named(o) for o in split(rest[0])] if rest else []
        statement = Statement(opcode, operands, guard, negated)
        block = self.kernel.blocks[-1]
        if opcode.startswith(("bra", "ret", "exit", "bar.sync", "barrier.sync")):
            block.end = statement
            self._next()
        else:
            block.statements.append(statement)

    def _named(self, operand: str) -> str:
        """An operand with the unique names of its registers."""

        def unique(match: re.Match[str]) -> str:
            return next((s[match[0]] for s in reversed(self.scopes) if match[0] in s), match[0])

        return re.sub(r"[%$\w.]+", unique, operand.strip())

    def _link(self) -> None:
        """Tell blocks where they lead, and put them in order."""
        blocks = self.kernel.blocks
        for n, block in enumerate(blocks):
            block.follows = n + 1 if n + 1 < len(blocks) else EXIT
            if block.end is not None and block.end.opcode.startswith("bra"):
                block.taken = self.labels[block.end.operands[0]]
        successors = {
            n: [m for m in _successors(block) if m != EXIT] for n, block in enumerate(blocks)
        }
        places = order(successors)
        place = {old: new for new, old in enumerate(places)} | {EXIT: EXIT}
        place |= {n: EXIT for n, block in enumerate(blocks) if _ends(block)}
        for block in blocks:
            block.taken, block.follows = place[block.taken], place[block.follows]
        self.kernel.blocks = [blocks[old] for old in places]


def _ends(block: Block) -> bool:
    """Whether threads that come here do nothing more; others need not wait for them."""
    end = block.end
    ends = end is not None and end.opcode.startswith(("ret", "exit")) and not end.guard
    return ends and not block.statements


def _successors(block: Block) -> list[int]:
    end = block.end
    if end is None or end.opcode.startswith("bar"):
        return [block.follows]
    if end.opcode.startswith("bra"):
        return [block.taken, block.follows] if end.guard else [block.taken]
    return [block.follows] if end.guard else []


def _pieces(text: str) -> Iterator[tuple[str, str]]:
    """Braces of scopes ("open", "close"), labels and statements ("do")."""
    form = re.compile(r"\s*(?:(\{)|(\})|([\w$]+)\s*:(?!:)|([^;]*);)")
    begin = 0
    while match := form.match(text, begin):
        begin = match.end()
        if match[1] or match[2]:
            yield ("open" if match[1] else "close"), ""
        elif match[3]:
            yield "label", match[3]
        elif match[4].strip():
            yield "do", " ".join(match[4].split())
    if text[begin:].strip():
        raise PtxError(f"text {text[begin : begin + 80].strip()!r}")


def split(text: str) -> list[str]:
    """Operands between commas that are in no brackets."""
    return re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text)


def readable(name: str) -> str:
    """The name of an array in CUDA: `S` of `_ZZ6kernelE1S`."""
    match = re.search(r"E(\d+)(\w+)$", name)
    return match[2][: int(match[1])] if name.startswith("_ZZ") and match else name
