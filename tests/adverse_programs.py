"""Random programs that look like what the compiler makes: its names, its predicates, its bounds.

Axes, buffers, iterations and coordinates have names that primitives and lowerings would give;
predicates are marked as likely, and indices are bounded, as split does; and programs read what they
write. Others have bodies of statements: loops with steps, whiles, branches, assertions, variables,
with divisions, casts, booleans and searches. What they mean is what the interpreter says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["KINDS", "Adverse", "adverse", "statement_program"]

# What split, positions, divide, peel, precompute and inits would call theirs, beside an axis K.
AXES = (
    "I", "J", "K", "K0", "K1", "K00", "K0_1", "I0", "I1", "J0", "I_all", "J_all", "K_all", "K_rest",
    "K_whole", "I_parts", "J_part", "J_tiles0", "I_J", "I_J0", "K_lanes", "I_panels", "O",
)  # fmt: skip
BUFFERS = (
    "A", "B", "C", "A_ws", "B_ws", "C_ws", "C_ws_sum", "C_run", "I_at", "J_at", "J_pos", "J_pos_1",
    "J_indptr", "J_indices", "A_packed", "B_tiles", "C_shared", "A_each", "C_rest", "lanes",
)  # fmt: skip
ITERATIONS = (
    "f", "f0", "f1", "f10", "f_init", "f_start", "f_reduce", "f_write", "f_sums", "f_rest", "f_add",
    "f_search", "f_step", "f_keep", "root",
)  # fmt: skip
COORDINATES = (
    "i", "j", "k", "k0", "k1", "k00", "k0_1", "i0", "i1", "j0", "vk0", "vi", "v", "ij", "k_parts",
    "i_row", "m_1",
)  # fmt: skip
HEAD = """
@T.prim_func
def adverse(a: T.handle, b: T.handle, c: T.handle, d: T.handle, x: T.handle, p: T.handle,
            q: T.handle, m: T.int32, n: T.int32, l: T.int32, nnz: T.int32):
    {I} = T.dense_fixed(m)
    {J} = T.sparse_variable({I}, (n, nnz), (p, q))
    {N} = T.dense_fixed(n)
    {K} = T.dense_fixed(l)
    {A} = T.match_sparse_buffer(a, ({I}, {J}), "float32")
    {B} = T.match_sparse_buffer(b, ({N}, {K}), "float32")
    {C} = T.match_sparse_buffer(c, ({I}, {K}), "float32")
    {D} = T.match_sparse_buffer(d, ({I}, {K}), "float32")
    {X} = T.match_sparse_buffer(x, ({I},), "int32")
    {W} = T.alloc_sparse_buffer((), "float32", "local")
"""
SPMM = """    with T.sp_iter([{I}, {J}, {K}], "SRS", "{f}") as [{i}, {j}, {k}]:
        with T.init():
            {C}[{i}, {k}] = {value}
{when}        {C}[{i}, {k}] = {C}[{i}, {k}] + {A}[{i}, {j}] * {B}[{j}, {at}]
"""
DENSE = """    with T.sp_iter([{I}, {N}, {K}], "SRS", "{f}") as [{i}, {j}, {k}]:
        with T.init():
            {C}[{i}, {k}] = {value}
{when}        {C}[{i}, {k}] = {C}[{i}, {k}] + {B}[{j}, {k}] * {D}[{i}, {at}]
"""
LARGEST = """    with T.sp_iter([{I}, {J}, {K}], "SRS", "{f}") as [{i}, {j}, {k}]:
        with T.init():
            {C}[{i}, {k}] = -3.0
{when}        {C}[{i}, {k}] = T.max({C}[{i}, {k}], {A}[{i}, {j}] * {B}[{j}, {at}])
"""
EACH = """    with T.sp_iter([{I}, {K}], "SS", "{f}") as [{i}, {k}]:
{when}        {C}[{i}, {k}] = {D}[{i}, {at}] * 2.0
"""
AGAIN = """    with T.sp_iter([{I}, {K}], "SS", "{g}") as [{i}, {k}]:
{when}        {C}[{i}, {k}] = {C}[{i}, {k}] * 0.5 + {D}[{i}, {at}]
"""
ORDERED = """    with T.sp_iter([{I}, {K}], "SS", "{g}") as [{i}, {k}]:
        T.sp_iter_attr({{"ordered": 1}})
{when}        {C}[{i}, {k}] = {C}[{i}, {k} - 1] * 0.5 + {D}[{i}, {at}]
"""
SCAN = """    {W}[()] = 0.0
    with T.sp_iter([{I}, {K}], "SS", "{g}") as [{i}, {k}]:
        T.sp_iter_attr({{"ordered": 1}})
        {W}[()] = {W}[()] * 0.5 + {D}[{i}, {at}]
{when}        {C}[{i}, {k}] = {W}[()]
"""
ROWS = """    with T.sp_iter([{I}, {K}], "SS", "{f}") as [{i}, {k}]:
        {W}[()] = {value}
        with T.sp_iter([{J}], "R", "{g}") as [{j}]:
{inner}            {W}[()] = {W}[()] + {A}[{i}, {j}] * {B}[{j}, {at}]
{when}        {C}[{i}, {k}] = {W}[()]
"""
SCATTERED = """    with T.sp_iter([{I}, {K}], "SS", "{g}") as [{i}, {k}]:
{when}        {C}[{X}[{i}], {k}] = {C}[{X}[{i}], {k}] + {D}[{i}, {at}]
"""
COLUMNS = """    with T.sp_iter([{I}, {J}, {K}], "RSS", "{f}") as [{i}, {j}, {k}]:
        with T.init():
            {B}[{j}, {k}] = {value}
{when}        {B}[{j}, {k}] = {B}[{j}, {k}] + {A}[{i}, {j}] * {D}[{i}, {at}]
"""
BODIES = (
    SPMM, SPMM, SPMM, DENSE, LARGEST, EACH, EACH, COLUMNS, ROWS, SPMM + AGAIN, EACH + AGAIN,
    DENSE + ORDERED, EACH + ORDERED, ORDERED, SCAN, SPMM + SCATTERED, EACH + SCATTERED,
)  # fmt: skip
PREDICATES = (
    "{i} >= {k}", "{k} <= {i}", "{k} < 5", "{k} < l - 1", "{i} * 2 - {k} >= 1", "{k} * 4 + {i} < l",
    "T.min({k} * 4, l - 4) + {i} >= {k} * 4", "{k} + {i} <= l - 1", "{D}[{i}, {k}] > 0.3",
    "{k} < 3 or {i} > 2", "{i} < m", "{k} % 3 != 1", "{k} >= {k} // 4 * 4",
)  # fmt: skip
INDICES = (
    "{k}", "{k}", "{k}", "T.min({k}, 4)", "T.min({k}, l - 1)", "T.min({k} * 2, l - 2)",
    "T.max({k} - 1, 0)", "{k} + 1", "{k} - 1", "T.min({i}, l - 4)", "T.min({k} * 4, l - 4) + 1",
    "l - 1 - {k}", "{k} // 2",
)  # fmt: skip


@dataclass(frozen=True)
class Adverse:
    """A program's text, its arguments, and the names of those that it writes."""

    text: str
    arguments: dict[str, Any]
    outputs: tuple[str, ...] = ("b", "c")


def adverse(rng: np.random.Generator) -> Adverse:
    """A random program."""

    def pick(options: Any) -> str:
        return str(options[rng.integers(len(options))])

    names: dict[str, str] = {}
    taken: set[str] = {"a", "b", "c", "d", "x", "p", "q", "m", "n", "l", "nnz", "T"}

    def draw(keys: str | tuple[str, ...], pool: tuple[str, ...]) -> None:
        for key in keys:
            names[key] = pick([name for name in pool if name not in taken])
            taken.add(names[key])

    draw("ABCDXW", BUFFERS)
    draw("IJNK", AXES)
    draw("ijk", COORDINATES)
    draw("fg", ITERATIONS)

    def condition(indent: int) -> str:
        kind = rng.integers(5)
        if kind == 0:
            return ""
        tests = [pick(PREDICATES).format(**names) for _ in range(1 + (kind == 4))]
        tests = [f"T.likely({t})" if rng.integers(3) else t for t in tests]
        return "".join(f"{' ' * (indent + 4 * n)}if {t}:\n" for n, t in enumerate(tests))

    text = HEAD.format(**names)
    for body in _parts(pick(BODIES)):
        fields = {**names, "value": pick(("0.0", "1.0", "0.5"))}
        fields |= {"at": pick(INDICES).format(**names), "inner": "", "when": ""}
        text += _with_condition(body, condition).format(**fields)
    return Adverse(text, _arguments(rng))


def _parts(text: str) -> list[str]:
    return [text]


def _with_condition(text: str, condition: Any) -> str:
    """A body with a predicate around the statement that is marked for one."""
    out = []
    for line in text.splitlines():
        mark = next((m for m in ("{when}", "{inner}") if line.startswith(m)), None)
        if mark is None:
            out.append(line)
            continue
        line = line.removeprefix(mark)
        indent = len(line) - len(line.lstrip())
        head = condition(indent)
        out.append(head.replace("{", "{{").replace("}", "}}") + "    " * head.count("\n") + line)
    return "\n".join(out) + "\n"


def _arguments(rng: np.random.Generator) -> dict[str, Any]:
    m, n, feat = (int(rng.integers(1, 9)), int(rng.integers(1, 8)), int(rng.integers(1, 23)))
    counts = rng.integers(0, n + 1, m)
    if rng.integers(4) == 0:
        counts[rng.integers(m)] = n
    columns = [np.sort(rng.permutation(n)[:count]) for count in counts]
    indices = np.concatenate(columns).astype("int32")

    def values(*shape: int) -> np.ndarray:
        return rng.uniform(-1, 1, shape).astype("float32")

    return {
        "a": values(len(indices)), "b": values(n, feat), "c": values(m, feat),
        "d": values(m, feat), "x": rng.integers(-1, m + 1, m).astype("int32"),
        "p": np.append(0, np.cumsum(counts)).astype("int32"), "q": indices,
        "m": m, "n": n, "l": feat, "nnz": len(indices),
    }  # fmt: skip


# What bodies of statements may have.
KINDS = (
    "assert", "bfloat16", "bool", "casts", "divisions", "fmod", "searches", "steps", "whiles",
)  # fmt: skip
TYPES = (
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "float16", "float32", "float64",
)  # fmt: skip
DECLARED = {
    "A": "T.match_sparse_buffer(a, (I, J), 'float32')",
    "D": "T.match_sparse_buffer(d, (I,), 'int32')",
    "E": "T.match_sparse_buffer(e, (I, J), 'int32')", "F": "T.match_sparse_buffer(f, (I,), 'bool')",
    "V": "T.match_sparse_buffer(v, (I,), 'DTYPE')", "W": "T.match_buffer(w, (n,), 'int32')",
    "X": "T.match_sparse_buffer(x, (I,), 'int32')", "Y": "T.match_sparse_buffer(y, (I,), 'int32')",
    "Z": "T.match_sparse_buffer(z, (I, N), 'int32')",
}  # fmt: skip
STATEMENTS = """
@T.prim_func
def statements({handles}p: T.handle, q: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (p, q))
    N = T.dense_fixed(n)
{buffers}    with T.sp_iter({head}:
"""


class _Body:
    """Draws the statements of a body, as lines of text.

    numbers : names of the integers that may be used
    over : what the body stores to
    """

    def __init__(self, rng: np.random.Generator, kinds: frozenset[str], over: str) -> None:
        self.rng, self.kinds, self.over = rng, kinds, over
        self.numbers = ["i", "m", "n", "D[i]", "X[i]", *(["j"] if "j" in over else [])]
        self.count = 0
        self.dtype = ""

    def pick(self, *options: Any) -> Any:
        return options[self.rng.integers(len(options))]

    def number(self, depth: int = 2) -> str:
        """An int32 expression that never divides by zero."""
        if not depth:
            return str(self.pick(self.rng.integers(-4, 7), *self.numbers, *self.numbers))
        a, b = self.number(depth - 1), self.number(depth - 1)
        c, d = self.number(0), self.pick(*self.numbers)
        of_all = [f"({a} {self.pick('+', '-', '*')} {b})", f"T.{self.pick('min', 'max')}({a}, {b})",
                  f"T.if_then_else({self.test(depth - 1)}, {a}, {b})",
                  f"T.Select({self.test(depth - 1)}, {a}, {b})",
                  f"T.if_then_else(0 <= {c} and {c} < n, W[{c}], {b})"]  # fmt: skip
        if "divisions" in self.kinds:
            by = self.pick("{} // {}", "{} % {}", "T.truncdiv({}, {})", "T.truncmod({}, {})")
            divided = by.format(a, d)
            choice = self.pick("T.if_then_else", "T.Select")
            of_all += [by.format(a, self.pick(2, 3, -2, 5)),
                       f"{choice}({d} != 0, {divided}, {c})",
                       f"{choice}({d} == 0 or {divided} > {c}, {c}, {b})"]  # fmt: skip
        if "searches" in self.kinds:
            of_all += [f"T.cast({self.element(depth - 1)}, 'int32')", f"Z[i, {a}]"]
        if "casts" in self.kinds:
            # Of few digits: what is beyond the range of a float's cast is not defined.
            small = f"(({a}) % 64)" if "divisions" in self.kinds else f"T.max(T.min({a}, 63), 0)"
            some = [*TYPES, "bfloat16"] if "bfloat16" in self.kinds else TYPES
            first, then = self.pick(*some), self.pick(*some)
            of_all.append(f"T.cast(T.cast(T.cast({small}, '{first}'), '{then}'), 'int32')")
        if "fmod" in self.kinds:
            rest = f"T.fmod(T.cast({a}, 'float32'), T.float32({self.pick(2.5, -3.0)}))"
            of_all.append(f"T.cast({rest}, 'int32')")
        return self.pick(*of_all, *self.numbers)

    def element(self, depth: int) -> str:
        """A float of the matrix, searched for or not."""
        return f"A[{self.pick('i', 'i', self.number(depth))}, {self.number(depth)}]"

    def test(self, depth: int = 1) -> str:
        """A condition."""
        if not depth:
            return f"{self.number(0)} {self.pick('<', '<=', '==', '!=', '>')} {self.number(0)}"
        a, b = self.test(depth - 1), self.test(depth - 1)
        of_all = [f"{self.number(depth)} {self.pick('<', '==', '>=')} {self.number(0)}",
                  f"({a} {self.pick('and', 'or')} {b})", f"T.Not({a})"]  # fmt: skip
        if "divisions" in self.kinds:
            d = self.pick(*self.numbers)
            of_all.append(f"({d} != 0 and {self.number(0)} // {d} >= {self.number(0)})")
        if "searches" in self.kinds:
            compared = f"{self.pick('>', '==')} {self.pick(0, 1, 2)}.0"
            of_all.append(f"{self.element(depth - 1)} {compared}")
        if "bool" in self.kinds:
            of_all.append("F[i]")
        return self.pick(*of_all)

    def store(self) -> str:
        """A statement that stores."""
        new = self.number()
        if self.over != "Y[i]":
            return f"{self.over} = ({self.over} + {new}) & 1023"
        to = [f"Y[i] = (Y[i] * 3 + {new}) & 1023", f"Z[i, {self.number(1)}] = {new} & 63"]
        if "casts" in self.kinds:
            to.append(f"V[i] = T.cast({new} & 63, '{self.dtype}')")
        if "bool" in self.kinds:
            to.append(f"F[i] = {self.test()}")
        return self.pick(*to)

    def block(self, depth: int, inside: bool = False) -> list[str]:
        """Some statements. inside : of a loop that may be left"""
        numbers = [*self.numbers]
        lines = [x for _ in range(self.pick(1, 1, 2, 2, 3)) for x in self.statement(depth, inside)]
        self.numbers = numbers
        return lines

    def statement(self, depth: int, inside: bool) -> list[str]:
        """A statement, as lines."""
        kind = self.rng.integers(8 if depth else 2)
        name = f"t{self.count}"
        self.count += 1

        def under(head: str, lines: list[str]) -> list[str]:
            return [head, *("    " + line for line in lines)]

        if kind == 1:
            value = self.number()
            self.numbers.append(name)
            return [f"{name}{self.pick('', ': T.let[T.int32]')} = {value}"]
        if kind == 2:
            lines = under(f"if {self.test(2)}:", self.block(depth - 1, inside))
            more = self.rng.integers(2) and under("else:", self.block(depth - 1, inside))
            return [*lines, *(more or [])]
        if kind == 3 and inside:
            jump = f"T.evaluate(T.{self.pick('break', 'continue')}_loop())"
            return under(f"if {self.test()}:", [jump])
        if kind == 4 and "assert" in self.kinds:
            return [f'assert ({self.number(1)} & 7) < 8, "of few bits"']
        if kind in (5, 6) and "steps" in self.kinds:
            return self.loop(name, depth)
        if kind == 7 and "whiles" in self.kinds:
            more = self.pick("", f" and {self.test()}", f" and {self.test()}")
            numbers = [*self.numbers]
            self.numbers.append(name)
            test = f"{name} < {self.pick(3, 4, 'n', 'D[i]')}{self.pick(more, more)}"
            lines = under(f"while {test}:", [f"{name} = {name} + 1", *self.block(depth - 1, True)])
            self.numbers = [*numbers, name]
            return [f"{name} = T.int32({self.pick(-1, 0, 1)})", *lines]
        return [self.store()]

    def loop(self, name: str, depth: int) -> list[str]:
        """A loop with a step."""
        start, stop = self.pick("0", "1", self.number(0)), self.pick("5", "n", self.number(0))
        step = self.pick("1", "2", "3", "-1", "-2", "s")
        kind = "range({}, {}, {})"
        if step in "123" and start in "01" and stop == "5":
            kind = self.pick(kind, "T.unroll({}, {}, step={})")
        if self.rng.integers(2) and step.startswith("-"):
            start, stop = stop, start
        lines = []
        if step == "s":
            lines, step = [f"{name}_step = {self.number(1)}"], f"{name}_step"
            kind = f"range({{}}, {{}}, T.Select({step} == 0, 1, {step}))"
        numbers = [*self.numbers]
        self.numbers.append(name)
        body = self.block(depth - 1, "unroll" not in kind)
        self.numbers = numbers
        return [*lines, f"for {name} in {kind.format(start, stop, step)}:",
                *("    " + line for line in body)]  # fmt: skip


FORMS = {
    '[I], "S", "f") as [i]': "Y[i]",
    '[I, J], "SS", "f") as [i, j]': "E[i, j]",
    '[I, J], "SR", "f") as [i, j]': "Y[i]",
    '[I], "S", "f") as [i]:\n        with T.sp_iter([J], "S", "g") as [j]': "Y[i] with j",
}


def statement_program(rng: np.random.Generator, kinds: Any = KINDS) -> Adverse:
    """A random program whose body has statements of these kinds."""
    heads = list(FORMS)
    head = heads[rng.integers(len(heads))]
    body = _Body(rng, frozenset(kinds), FORMS[head].removesuffix(" with j"))
    body.dtype = str(body.pick(*TYPES))
    if ", j]" in head or "[j]" in head:
        body.numbers.append("j")
    indent = " " * (12 if "[j]" in head else 8)
    if '"SR"' in head:  # a reduction
        update = body.pick("Y[i] + {}", "T.max(Y[i], {})").format(body.number())
        lines = ["with T.init():", f"    Y[i] = {body.rng.integers(-2, 3)}", f"Y[i] = {update}"]
        if rng.integers(2):
            lines[2:] = [f"if {body.test(2)}:", f"    {lines[2]}"]
    else:
        lines = body.block(2)
        if "[j]" in head:
            lines.insert(0, 'T.sp_iter_attr({"ordered": 1})')
    used = [name for name in DECLARED if name == "Y" or any(f"{name}[" in line for line in lines)]
    text = STATEMENTS.format(
        head=head, handles="".join(f"{name.lower()}: T.handle, " for name in used),
        buffers="".join(f"    {name} = {DECLARED[name]}\n" for name in used),
    ).replace("DTYPE", body.dtype)  # fmt: skip
    text += "".join(f"{indent}{line}\n" for line in lines)
    arrays = _arguments(rng)
    m, n, nnz = arrays["m"], arrays["n"], arrays["nnz"]
    some: dict[str, Any] = {
        "a": rng.integers(-3, 4, nnz).astype("float32"), "d": rng.integers(-3, 4, m),
        "e": rng.integers(-3, 4, nnz), "f": rng.integers(0, 2, m).astype("bool"),
        "v": np.zeros(m, body.dtype), "w": rng.integers(-3, 8, n), "x": rng.integers(-2, n + 2, m),
        "y": rng.integers(-3, 4, m), "z": rng.integers(-3, 4, (m, n)),
    }  # fmt: skip
    for name in "dewxyz":
        some[name] = some[name].astype("int32")
    some = {name: some[name] for name in map(str.lower, used)}
    sizes = {name: arrays[name] for name in ("p", "q", "m", "n", "nnz")}
    return Adverse(text, some | sizes, tuple(some))
