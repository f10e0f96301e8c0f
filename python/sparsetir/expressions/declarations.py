"""The axes, buffers and parameters of a program, declared on demand."""

from __future__ import annotations

import keyword
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparsetir.expressions.assignments import Assignment
from sparsetir.expressions.storage import DENSE, REPEATED, SLOTS, Storage
from sparsetir.expressions.trees import Access, Affine, accesses, indices_of  # fmt: skip
from sparsetir.expressions.visits import driven, levels_of

RESERVED = {"T", "TIR", "tvm", "TypeVar", *keyword.kwlist}


@dataclass
class PatternAxes:
    """The axes of a pattern that is accessed at some indices.

    operand : the operand with the pattern
    access : the first access at these indices
    levels : the kind of each level from the root down
    dims : the dimension of each level
    axes : the axis of each level
    """

    operand: str
    access: Access
    levels: str
    dims: tuple[int, ...]
    axes: tuple[str, ...]

    @property
    def rooted(self) -> bool:
        """Whether its first level is below an axis of length 1."""
        return self.levels[0] != DENSE


Key = tuple[str, tuple[Affine, ...]]


class Declarations:
    """The declarations of a program, as lines of text."""

    def __init__(
        self, steps: Sequence[Assignment], operands: Mapping[str, Storage], acc: str, idtype: str,
        assembled: bool, fixed: Mapping[str, int],
    ) -> None:  # fmt: skip
        self.fixed = {name: str(size) for name, size in fixed.items()}
        self.steps, self.operands, self.acc, self.idtype = list(steps), dict(operands), acc, idtype
        self.assembled = assembled
        self.taken: set[str] = set(RESERVED)
        self.params: dict[str, list[str]] = {"handles": [], "arrays": [], "result": [], "sizes": []}
        self.axis_lines: list[str] = []
        self.buffer_lines: list[str] = []
        self.body: list[str] = []
        self.dense_axes: dict[str, str] = {}
        self.patterns: dict[Key, PatternAxes] = {}
        self.buffers: dict[tuple[str, object], tuple[str, PatternAxes | None]] = {}
        self.merged: dict[str, str] = {}  # names of merged axes
        self.values: dict[str, tuple[str, Key | None]] = {}
        self.sizes: dict[str | tuple[str, int], str] = {}
        self.root: str | None = None
        last = self.steps[-1]
        self.inner = {s.result.name: s.like for s in self.steps[:-1]}
        for step in self.steps[:-1]:
            form = self.form(step.like) if step.like else Storage(acc, 0)
            kept = form.levels, form.order, self.pattern_name(step.like) if step.like else None
            rank = len(step.result.indices)
            self.operands[step.result.name] = Storage(acc, rank, *kept)
        self.result = last.result
        self._names = [x.name for s in self.steps for t in s.terms for x in accesses(t.value)]
        for name in dict.fromkeys([last.result.name, *self._names]):
            self._fresh(name)  # operands keep their names
        for index in dict.fromkeys(
            n for s in self.steps for t in s.terms for n in indices_of(t.value)
        ):
            self.taken.add(index)
        self.origin = self._fresh("o")  # the coordinate of the root

    # -- names and types ---------------------------------------------------------------------------

    def _fresh(self, wish: str) -> str:
        while wish in self.taken:
            wish += "_"
        self.taken.add(wish)
        return wish

    def form(self, access: Access) -> Storage:
        """The storage of the accessed operand."""
        return self.operands[access.name]

    def pattern_name(self, access: Access) -> str:
        """The operand whose pattern the accessed one has."""
        return self.form(access).pattern or access.name

    def sparse(self, access: Access) -> bool:
        """Whether the accessed operand stores a pattern."""
        return self.form(access).sparse

    def _size(self, of: str | tuple[str, int]) -> str:
        """The size of an index, or of a dimension of an operand: a parameter, or a number."""
        if isinstance(of, str) and of in self.fixed:
            return self.fixed[of]
        if of not in self.sizes:
            wish = f"n_{of.lstrip('_')}" if isinstance(of, str) else f"{of[0]}_{of[1]}"
            self.sizes[of] = self._param("sizes", wish)
        return self.sizes[of]

    def _length(self, access: Access, d: int) -> str:
        return self._size(access.plain[d] or (access.name, d))

    def _param(self, kind: str, wish: str) -> str:
        name = self._fresh(wish)
        what = f"T.{self.idtype}" if kind == "sizes" else "T.handle"
        self.params[kind].append(f"{name}: {what}")
        return name

    # -- axes and buffers --------------------------------------------------------------------------

    def axis(self, wish: str, constructor: str) -> str:
        """Declare an axis; {} stands for the type of its coordinates."""
        name = self._fresh(wish)
        typed = "" if self.idtype == "int32" else f', idtype="{self.idtype}"'
        self.axis_lines.append(f"{name} = {constructor.format(typed)}")
        return name

    def dense(self, index: str) -> str:
        """The axis of all coordinates of an index, declared once."""
        if index not in self.dense_axes:
            wish = (
                index.lstrip("_").upper()
                if index.lstrip("_").islower()
                else f"{index.lstrip('_')}_"
            )
            wish = wish if not wish.isdigit() else f"D{wish}"
            self.dense_axes[index] = self.axis(wish, f"T.dense_fixed({self._size(index)}{{}})")
        return self.dense_axes[index]

    def pattern(self, access: Access, order: Sequence[str] = ()) -> PatternAxes:
        """The axes of a sparse operand at some indices, declared once."""
        name, form = self.pattern_name(access), self.form(access)
        key = name, access.indices
        if key in self.patterns:
            return self.patterns[key]
        levels = levels_of(access, form, order)
        number = sum(k[0] == name for k in self.patterns)
        base = f"{name}{number + 1}_" if number else name
        axes: list[str] = []
        known = driven(access, levels)
        for n, (kind, d) in enumerate(zip(form.levels, levels, strict=True)):
            length = self._length(access, d)
            if kind == DENSE and n < len(known):
                axes.append(self.dense(known[n]))
                continue
            if kind == DENSE:
                axes.append(self.axis(f"{base}{d}", f"T.dense_fixed({length}{{}})"))
                continue
            if not axes:
                self.root = self.root or self.axis("O", "T.dense_fixed(1{})")
            ptr = self._param("arrays", f"{base}{d}_ptr") if kind != SLOTS else None
            idx = self._param("arrays", f"{base}{d}_idx")
            count = self._param("sizes", f"{base}{d}_{'nnz' if ptr else 'cols'}")
            call = (
                f"variable({{}}, ({length}, {count}), ({ptr}, {idx})"
                if ptr
                else (f"fixed({{}}, ({length}, {count}), {idx}")
            )
            more = ", unique=False" if kind == REPEATED else ""
            constructor = "T.sparse_" + call.format(axes[-1] if axes else self.root)
            axes.append(self.axis(f"{base}{d}", constructor + "{}" + more + ")"))
        declared = PatternAxes(name, access, form.levels, tuple(levels), tuple(axes))
        self.patterns[key] = declared
        return declared

    def _open(self, access: Access, form: Storage) -> PatternAxes:
        """The axes of a result whose pattern the program computes."""
        levels, axes = levels_of(access, form), list[str]()
        for kind, d in zip(form.levels, levels, strict=True):
            name = str(access.plain[d])
            if kind == DENSE:
                axes.append(self.dense(name))
                continue
            self.root = self.root or (None if axes else self.axis("O", "T.dense_fixed(1{})"))
            wish = f"{access.name}{d}"
            arrays = ", ".join(self._param("result", f"{wish}_{x}") for x in ("ptr", "idx"))
            parent, size = axes[-1] if axes else self.root, self._size(name)
            constructor = f"T.sparse_variable({parent}, ({size}, None), ({arrays}){{}})"
            axes.append(self.axis(wish, constructor))
        return PatternAxes(access.name, access, form.levels, tuple(levels), tuple(axes))

    def buffer(self, access: Access) -> tuple[str, PatternAxes | None]:
        """The buffer of an operand at some indices, and its pattern's axes, if any."""
        form, plain = self.form(access), access.plain
        simple = None not in plain and len(set(plain)) == len(plain)
        key = access.name, access.indices if form.sparse or simple else None
        if key in self.buffers:
            return self.buffers[key]
        if self.assembled and access.name == self.result.name:
            pattern = self._open(access, form)
        else:
            pattern = self.pattern(access) if form.sparse else None
        if pattern:
            axes = [*([self.root] if pattern.rooted else []), *pattern.axes]
        elif simple:
            axes = [self.dense(n) for n in plain if n]
        else:
            sizes = [self._size((access.name, d)) for d in range(form.rank)]
            axes = [
                self.axis(f"{access.name}{d}", f"T.dense_fixed({n}{{}})")
                for d, n in enumerate(sizes)
            ]
        again = sum(k[0] == access.name for k in self.buffers)
        name = self._fresh(f"{access.name}{again + 1}") if again else access.name
        name = self._fresh(f"{name}_") if name in RESERVED else name
        over = f"({', '.join(map(str, axes))}{',' if len(axes) == 1 else ''})"
        self.buffers[key] = name, pattern
        if access.name in self.inner:
            self.buffer_lines.append(f'{name} = T.alloc_sparse_buffer({over}, "{form.dtype}")')
            return self.buffers[key]
        kind = "result" if access.name == self.result.name else "handles"
        handle = self._param(kind, name.lower() if name.lower() != name else f"{name}_values")
        self.buffer_lines.append(
            f'{name} = T.match_sparse_buffer({handle}, {over}, "{form.dtype}")'
        )
        over_pattern = pattern and (pattern.operand, access.indices)
        self.values[handle] = access.name, over_pattern if over_pattern in self.patterns else None
        if kind == "result":
            self.result_handle = handle
        return self.buffers[key]
