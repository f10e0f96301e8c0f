"""The stage-I program of assignments, written as text, with an iteration for each term."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from sparsetir.expressions.assignments import Assignment, Term, domain
from sparsetir.expressions.declarations import Declarations, Key, PatternAxes
from sparsetir.expressions.notation import COMPARISONS, FUNCTIONS
from sparsetir.expressions.storage import DENSE, REPEATED, Storage
from sparsetir.expressions.trees import (
    Access,
    Call,
    Index,
    Number,
    Tree,
    accesses,
    indices_of,
)  # fmt: skip
from sparsetir.expressions.visits import (
    Drivers,
    driven,
    drivers,
    levels_of,
    stored_order,
    visit_order,
)
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.script.parser import from_source

PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "neg": 2}


@dataclass
class Program:
    """A program and the meaning of its parameters; or one that is derived from it.

    values : for each array of values the operand, and its pattern, if any
    result : the parameter of the result
    patterns : patterns by operand and indices
    sizes : for each size its index, or its operand and dimension
    """

    func: SparseFunc
    values: dict[str, tuple[str, Key | None]]
    result: str
    patterns: dict[Key, PatternAxes]
    sizes: dict[str, str | tuple[str, int]]


def program(
    steps: Sequence[Assignment], operands: Mapping[str, Storage], acc: str, idtype: str = "int32",
    assembled: bool = False, fixed: Mapping[str, int] | None = None,
) -> Program:  # fmt: skip
    """Write the program of assignments.

    steps : assignments in order; results of all but the last are internal
    operands : the storage of each operand, and of the last result, by name
    acc : the type of computations
    assembled : whether the result is sparse, with a pattern of its own
    fixed : sizes of some indices, which are then not parameters

    Raises ValueError if the language cannot express it.
    """
    return _Writer(steps, operands, acc, idtype, assembled, fixed or {}).program()


def _merged(how: str, axes: Sequence[str]) -> str:
    """The text of merged axes."""
    return axes[0] if len(axes) == 1 else f"T.{how}({', '.join(axes)})"


class _Writer(Declarations):
    # -- expressions -------------------------------------------------------------------------------

    def _load(self, access: Access) -> str:
        name, pattern = self.buffer(access)
        places = [str(i) for i in access.indices]
        if pattern:
            places = [places[d] for d in pattern.dims]
            places = [self.at_root] * pattern.rooted + places
        return f"{name}[{', '.join(places) or '()'}]"

    def _text(self, tree: Tree) -> str:
        acc = self.acc
        if isinstance(tree, Number):
            value = tree.value if acc.startswith(("float", "bfloat")) else int(tree.value)
            return f"T.{acc}({float(value) if acc.startswith('float') else value})"
        if isinstance(tree, Index):
            return f'T.cast({tree.name}, "{acc}")'
        if isinstance(tree, Access):
            load = self._load(tree)
            return load if self.form(tree).dtype == acc else f'T.cast({load}, "{acc}")'
        assert isinstance(tree, Call)
        op, args = tree.op, tree.args
        if op == "**":
            power = args[1]
            if isinstance(power, Number) and power.value in (2, 3):
                return " * ".join([self._wrapped(args[0], 3)] * int(power.value))
            return f"T.pow({self._text(args[0])}, {self._text(power)})"
        if op in COMPARISONS:
            return f"T.Select({self._truth(tree)}, {self._one(1)}, {self._one(0)})"
        if op == "and":
            return " * ".join(
                f"T.Select({self._truth(x)}, {self._one(1)}, {self._one(0)})" for x in args
            )
        if op == "where":
            return f"T.Select({self._truth(args[0])}, {self._text(args[1])}, {self._text(args[2])})"
        if op == "neg":
            return f"-{self._wrapped(args[0], 3)}"
        if op in PRECEDENCE:
            a = self._wrapped(args[0], PRECEDENCE[op])
            b = self._wrapped(args[1], PRECEDENCE[op] + (op in "-/"))
            return f"{a} {op} {b}"
        texts = [self._text(x) for x in args]
        if op == "relu":
            return f"T.max({texts[0]}, {self._one(0)})"
        call = {"maximum": "T.max", "minimum": "T.min", "abs": "T.abs"}.get(op) or FUNCTIONS[op][0]
        return f"{call}({', '.join(texts)})"

    def _one(self, value: int) -> str:
        return self._text(Number(value))

    def _truth(self, tree: Tree) -> str:
        if isinstance(tree, Call) and tree.op in COMPARISONS:
            return f"{self._wrapped(tree.args[0], 1)} {tree.op} {self._wrapped(tree.args[1], 1)}"
        return f"{self._wrapped(tree, 1)} != {self._one(0)}"

    def _wrapped(self, tree: Tree, least: int) -> str:
        text = self._text(tree)
        weak = isinstance(tree, Call) and PRECEDENCE.get(tree.op, 9) < least
        weak = weak or (isinstance(tree, Call) and tree.op in ("**", "and") and least > 2)
        return f"({text})" if weak else text

    # -- iterations --------------------------------------------------------------------------------

    def _plan(self, term: Term, step: Assignment) -> tuple[Drivers, list[str]]:
        """The accesses that bound the iteration of a term, and the order of its indices."""
        result, mask = step.result, step.like
        bounds, order = self._bounded(term, result, mask)
        if mask and step.computed and term.over:
            # The visits of a product are fewer than those of its pattern's elements.
            out, (others, other_order) = {*result.plain}, self._bounded(term, result, None)
            each = [{n for x in s for n in x.plain} for s in others.where]
            if all(out <= s for s in each) and not any(out <= {*x.plain} for x in others.accesses):
                bounds, order = others, other_order
        for x in bounds.accesses:  # fixes the order of their levels for other terms
            self.pattern(x, order)
        return bounds, order

    def _bounded(
        self, term: Term, result: Access, mask: Access | None
    ) -> tuple[Drivers, list[str]]:
        """The result of :meth:`_plan`, bounded by a mask, if any."""
        where = domain(term.value, self.sparse)
        if mask:
            where = tuple(dict.fromkeys(s | {mask} for s in where))
        bounds = drivers(where, lambda x: None not in x.plain and len(set(x.plain)) == len(x.plain))
        taken = bounds.accesses
        gone = [x for x in taken if not driven(x, levels_of(x, self.form(x)))]
        bounds = bounds.without(gone)
        bounds = bounds.without(self._repeating(bounds.accesses))
        out = [n for n in result.plain if n]
        bound = (n for x in taken for n in x.plain if n)
        names = list(dict.fromkeys([*indices_of(term.value), *term.over, *out, *bound]))
        flat = [x for x in accesses(term.value) if not self.sparse(x)]
        flat += [] if self.sparse(result) else [result]
        rows = None
        if self.assembled and result is self.result:
            out = [str(result.plain[d]) for d in levels_of(result, self.form(result))]
            rows = out[0]
        while True:
            taken = bounds.accesses
            forms = [(x, self._known_form(x)) for x in taken]
            # Rows of an assembled matrix are made one after the other.
            order = None if rows and len(out) > 1 else stored_order(names, forms)
            order = order or visit_order(names, out, forms, flat, rows)
            gone = taken[-1:] if order is None else self._unmergeable(taken, order)
            if order is not None and not gone:
                return bounds, order
            bounds = bounds.without(gone)

    def _unmergeable(self, taken: Sequence[Access], order: Sequence[str]) -> list[Access]:
        """Accesses whose axes cannot merge with earlier ones, as they are below different axes."""
        above: dict[str, str] = {}
        gone: list[Access] = []
        for x in taken:
            form = self._known_form(x)
            levels = levels_of(x, form, order)
            names = driven(x, levels)
            pairs = [
                (n, over) for n, over, kind in zip(names[1:], names, form.levels, strict=False)
                if kind != DENSE and form.levels[names.index(n)] != DENSE
            ]  # fmt: skip
            if any(above.setdefault(n, over) != over for n, over in pairs):
                gone.append(x)
        return gone

    def _known_form(self, access: Access) -> Storage:
        """The storage, in the order of levels fixed by an earlier iteration."""
        form, key = self.form(access), (self.pattern_name(access), access.indices)
        if key in self.patterns and form.order is None:
            return Storage(form.dtype, form.rank, form.levels, self.patterns[key].dims)
        return form

    def _repeating(self, taken: Sequence[Access]) -> list[Access]:
        """Accesses that cannot be visited together with one whose coordinates repeat."""
        first = [x for x in taken if REPEATED in self.form(x).levels][:1]
        at = {n for x in first for n in x.plain if n}
        return [x for x in taken if x not in first and not at.isdisjoint(x.plain)]

    def _loops(self, bounds: Drivers, order: list[str]) -> dict[str, str]:
        """The axis to visit for each index."""
        at_pattern = {x: self.pattern(x, order) for x in bounds.accesses}
        patterns = list({id(p): p for p in at_pattern.values()}.values())
        loops: dict[str, str] = {}
        visited = {"": str(self.root)}  # the axis of each loop
        inside: dict[str, set[str]] = {}  # the axes that a loop visits
        for index in order:
            here: list[tuple[str, str, str, str]] = []
            for p in patterns:
                names = driven(p.access, p.dims)
                n = names.index(index) if index in names else -1
                if n < 0 or p.levels[n] == DENSE:
                    continue
                axis = p.axes[n]
                text = axis
                if n and p.axes[n - 1] not in inside[names[n - 1]]:
                    text = f"T.attach({axis}, {visited[names[n - 1]]})"
                here.append((axis, text, p.axes[n - 1] if n else "", names[n - 1] if n else ""))
            # Merged axes share a parent, or have merged parents; others are attached, which is
            # possible below dense axes.
            free = [x for x in here if "T.attach" not in x[1]]
            first = next((x[3] for x in free if x[3] and x[2] not in self.dense_axes.values()), "")
            first = first or (free[0][3] if free else "")
            here = [
                x if x[3] == first or "T.attach" in x[1]
                else (x[0], f"T.attach({x[0]}, {visited[x[3]]})", *x[2:]) for x in here
            ]  # fmt: skip
            texts = {axis: text for axis, text, *_ in here}
            of = [{a for x in s for a in at_pattern[x].axes} for s in bounds.where]
            sets = list(dict.fromkeys(frozenset(texts.keys() & axes) for axes in of))
            if frozenset() in sets:  # everywhere, except axes that are parents of others
                dense, below = self.dense(index), {a for p in patterns for a in p.axes[:-1]}
                texts = {dense: dense, **{a: x for a, x in texts.items() if a in below}}
                sets = [frozenset([a]) for a in texts]
            inside[index] = set().union(*sets)
            each = [_merged("intersect", [texts[a] for a in texts if a in axes]) for axes in sets]
            loop = _merged("union", each)
            if len(inside[index]) == 1:
                loops[index], (visited[index],) = loop, inside[index]
                continue
            if loop not in self.merged:
                wish = "_".join(a for a in texts if a in inside[index])
                self.merged[loop] = self.axis(wish, loop)
            loops[index] = visited[index] = self.merged[loop]
        self._begin(patterns)
        return loops

    def _begin(self, patterns: Sequence[PatternAxes]) -> None:
        """Make loads start at the root's variable, if iterations over these patterns have one."""
        self.at_root = self.origin if any(p.rooted for p in patterns) else "0"

    def _iterate(
        self, loops: Mapping[str, str], out: Sequence[str], name: str, body: list[str]
    ) -> None:
        """Write an iteration, below the root if :attr:`at_root` is its variable or it has no loops.

        out : the spatial indices
        """
        axes, names = list(loops.values()), list(loops)
        kinds = "".join("S" if n in out else "R" for n in names)
        if self.at_root != "0" or not axes:
            self.root = self.root or self.axis("O", "T.dense_fixed(1{})")
            axes, names, kinds = [self.root, *axes], [self.origin, *names], f"S{kinds}"
        head = f'with T.sp_iter([{", ".join(axes)}], "{kinds}", "{name}")'
        self.body += [f"{head} as [{', '.join(names)}]:", *(f"    {line}" for line in body)]

    def _store(self, result: Access, op: str, value: Tree) -> str:
        """The text of an update of the result."""
        target, dtype = self._load(result), self.form(result).dtype
        held = target if dtype == self.acc else f'T.cast({target}, "{self.acc}")'
        symbol = {"sum": "+", "prod": "*"}.get(op)
        text = self._wrapped(value, PRECEDENCE[symbol] + 1 if symbol else 0)
        call = "max" if op == "or" else op
        return self._set(
            result, f"{held} {symbol} {text}" if symbol else f"T.{call}({held}, {text})"
        )

    def _set(self, result: Access, text: str) -> str:
        """The text of an assignment to the result."""
        dtype = self.form(result).dtype
        value = text if dtype == self.acc else f'T.cast({text}, "{dtype}")'
        return f"{self._load(result)} = {value}"

    def _identity(self, op: str) -> str:
        """The identity of a reduction, in the type of computations."""
        if op in ("sum", "prod", "or"):
            return self._text(Number(int(op == "prod")))
        if self.acc.startswith("float"):
            return f'T.{self.acc}("{"-" if op == "max" else ""}inf")'
        return f'T.{"min" if op == "max" else "max"}_value("{self.acc}")'

    def _assign(self, step: Assignment) -> None:
        """Write the iterations of an assignment."""
        result, op, name = step.result, step.op, step.result.name
        out = [n for n in result.plain if n]
        if step.like:
            self.pattern(step.like)
        elif not self.assembled:
            for n in out:
                self.dense(n)
        plans = [(t, *self._plan(t, step)) for t in step.terms]
        for term, bounds, _ in plans:
            self._check_searched([*accesses(term.value), result], bounds)
        # Terms without reductions that are visited everywhere set the result, in one iteration.
        whole = [t.value for t, by, _ in plans if op == "sum" and not t.over and not by.accesses]
        plans = [p for p in plans if op != "sum" or p[0].over or p[1].accesses]
        begun = step.accumulates
        self._begin([])
        if whole:
            value = reduce(lambda x, y: Call("+", (x, y)), whole)
            line = self._store(result, op, value) if begun else self._set(result, self._text(value))
            self._iterate({n: self.dense(n) for n in out}, out, f"{name}_set", [line])
            begun = True
        for n, (term, bounds, order) in enumerate(plans):
            if op != "sum" and not bounds.exact:
                raise ValueError(
                    f"'{op}' of '{name}': expected a term that is bounded by one sparse operand, "
                    "a product, or a sum of operands at the same indices; reduce its parts"
                )
            loops = self._loops(bounds, order)
            covered = self.assembled or (
                self._covers(bounds, step.like) if step.like
                else all(loops[i] == self.dense_axes.get(i) for i in out)
            )  # fmt: skip
            body = [self._store(result, op, term.value)]
            if not begun and covered and op == "sum" and not term.over and len(plans) == 1:
                body = [self._set(result, self._text(term.value))]
            elif not begun and covered:
                body = ["with T.init():", f"    {self._set(result, self._identity(op))}", *body]
            elif not begun:
                self._clear(step)
            begun = True
            self._iterate(loops, out, f"{name}_{n}" if len(plans) > 1 else name, body)

    def _check_searched(self, read: Sequence[Access], bounds: Drivers) -> None:
        """Raise for operands with repeated rows that do not bound the iteration themselves."""
        visited = {(self.pattern_name(x), x.indices) for x in bounds.accesses}
        for x in read:
            repeats = REPEATED in self.form(x).levels
            if repeats and (self.pattern_name(x), x.indices) not in visited:
                raise ValueError(
                    f"operand '{x.name}': expected a format that can be searched, such as 'csr', "
                    "where it does not bound what is visited; the rows of 'coo' repeat"
                )

    def _covers(self, bounds: Drivers, like: Access) -> bool:
        """Whether an iteration visits all elements of the result's pattern."""
        key = self.pattern_name(like), like.indices
        return all((self.pattern_name(x), x.indices) == key for x in bounds.accesses)

    def _clear(self, step: Assignment) -> None:
        """Write an iteration that sets a result to the identity of its reduction."""
        result, kept = step.result, self.at_root
        out = [n for n in result.plain if n]
        loops, patterns = {n: self.dense(n) for n in out if not step.like}, []
        if step.like:
            p = self.pattern(step.like)
            loops = {str(step.like.plain[d]): axis for d, axis in zip(p.dims, p.axes, strict=True)}
            patterns = [p]
        self._begin(patterns)
        line = self._set(result, self._identity(step.op))
        self._iterate(loops, out, f"{result.name}_zero", [line])
        self.at_root = kept

    def program(self) -> Program:
        for step in self.steps:
            if step.like:
                # A result with an operand's pattern has its axes.
                form = self.form(step.like)
                like_storage = Storage(
                    self.operands[step.result.name].dtype,
                    form.rank,
                    form.levels,
                    form.order,
                    self.pattern_name(step.like),
                )
                self.operands[step.result.name] = like_storage
            self._assign(step)
        params = [p for kind in self.params.values() for p in kind]
        lines = [*self.axis_lines, *self.buffer_lines, *self.body]
        text = (
            f"@T.prim_func\ndef expression({', '.join(params)}):\n    "
            + "\n    ".join(lines)
            + "\n"
        )
        sizes = {param: of for of, param in self.sizes.items()}
        return Program(from_source(text), self.values, self.result_handle, self.patterns, sizes)
