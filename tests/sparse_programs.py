"""Programs of sparse tensors of any levels, with operands drawn at random, and decoded results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

SIZES = {"i": 6, "j": 7, "k": 5, "l": 4}


class Tensors:
    """The text and the arguments of a program, written bit by bit.

    Tensors are declared as `A=ds:ik`: the levels, dense or sparse, and the index of each. The axis
    of `k` is `KA`, or `K` of the levels of `under`; above sparse roots is the axis `O` with `o`.

    dense, mask : of each operand its values with zeros, and where it stores, by its indices sorted
    loads : of each tensor how it is accessed
    """

    def __init__(
        self, *operands: str, seed: int = 0, idtype: str = "int32", density: float = 0.4,
        sizes: Mapping[str, int] = SIZES,
    ) -> None:  # fmt: skip
        self.rng, self.idtype, self.density = np.random.default_rng(seed), idtype, density
        self.sizes = dict(sizes)
        self.args: dict[str, Any] = {f"n{x}": n for x, n in sizes.items()}
        self.lines = [f"O = T.dense_fixed(1, '{idtype}')"]
        self.loads: dict[str, str] = {}
        self.dense: dict[str, np.ndarray] = {}
        self.mask: dict[str, np.ndarray] = {}
        self.handles = ["c"]
        for text in operands:
            self._operand(*text.replace("=", ":").split(":"))

    def _axis(self, name: str, kind: str) -> str:
        self.lines.append(f"{name} = T.{kind}, '{self.idtype}')")
        return name

    def _buffer(self, name: str, over: list[str], index: str, handle: str) -> None:
        self.lines.append(f"{name} = T.match_sparse_buffer({handle}, ({', '.join(over)},))")
        self.loads[name] = f"{name}[{', '.join([*'o'[: over[0] == 'O'], *index])}]"

    def _operand(self, name: str, levels: str, index: str, under: str = "") -> None:
        low, order = name.lower(), np.argsort(np.argsort([*index]))
        shape = [self.sizes[x] for x in sorted(index)]
        mask = self.rng.random(shape) < self.density
        if "s" not in levels:
            mask[:] = True
        elif len(mask) > 2:
            mask[1], mask[2] = False, self.density > 0
        self.mask[name] = mask
        self.dense[name] = self.rng.integers(1, 6, shape) * mask
        values, stored = self.dense[name].transpose(order), mask.transpose(order)
        self.args[low] = np.ascontiguousarray(
            values[stored] if "s" in levels else values, "float32"
        )
        position, parents, over = np.zeros(stored.sum(), int), 1, ["O"] * (levels[0] == "s")
        for d, (level, x) in enumerate(zip(levels, index, strict=True)):
            keys = position * self.sizes[x] + np.nonzero(stored)[d]
            axis = f"{x.upper()}{name}"
            if level == "d":
                over.append(under if under and not d else self._axis(axis, f"dense_fixed(n{x}"))
                position, parents = keys, parents * self.sizes[x]
                continue
            distinct, position = np.unique(keys, return_inverse=True)
            ptr = np.searchsorted(distinct // self.sizes[x], np.arange(parents + 1))
            arrays = {"ptr": ptr, "idx": distinct % self.sizes[x]}
            self.args |= {f"{low}{d}_{n}": v.astype(self.idtype) for n, v in arrays.items()}
            self.args[f"{low}{d}_nnz"] = parents = len(distinct)
            size, names = f"(n{x}, {low}{d}_nnz)", f"({low}{d}_ptr, {low}{d}_idx)"
            over.append(self._axis(axis, f"sparse_variable({over[-1]}, {size}, {names}"))
        self._buffer(name, over, index, low)

    def result(self, levels: str, index: str) -> Tensors:
        """Declare C, whose sparse levels are assembled; dense ones behind them are of elements."""
        self.of, over = (levels, index), ["O"] * (levels[0] == "s")
        for d, (level, x) in enumerate(zip(levels, index, strict=True)):
            axis = f"{x.upper()}C"
            if level == "d":
                over.append(self._axis(axis, f"dense_fixed(n{x}"))
                continue
            names = f"(c{d}_ptr, c{d}_idx)"
            over.append(self._axis(axis, f"sparse_variable({over[-1]}, (n{x}, None), {names}"))
            self.handles += [f"c{d}_ptr", f"c{d}_idx"]
        self._buffer("C", over, index, "c")
        return self

    def declare(self, *lines: str) -> Tensors:
        """More lines of declarations."""
        self.lines += lines
        return self

    def iterate(
        self, loops: str, kinds: str, body: str, init: str = "", condition: str = ""
    ) -> Tensors:
        """An iteration over `o=O; i=IA`; in body and condition {A} is an access of A."""
        pairs = [x.split("=") for x in loops.split("; ")]
        number = sum("sp_iter" in line for line in self.lines)
        axes, names = (", ".join(p[n].strip() for p in pairs) for n in (1, 0))
        self.lines.append(f"with T.sp_iter([{axes}], '{kinds}', 'it{number}') as [{names}]:")
        if init:
            self.lines += ["    with T.init():", f"        {self.loads['C']} = {init}"]
        if condition:
            self.lines.append(f"    if {condition.format(**self.loads)}:")
        indent = "        " if condition else "    "
        self.lines.append(indent + body.format(**self.loads))
        return self

    @property
    def text(self) -> str:
        """The whole program."""
        arrays = {n: isinstance(x, np.ndarray) for n, x in self.args.items()}
        params = [f"{n}: T.{'handle' if a else self.idtype}" for n, a in arrays.items()]
        params += [f"{n}: T.handle" for n in self.handles]
        return "\n    ".join([f"@T.prim_func\ndef f({', '.join(params)}):", *self.lines]) + "\n"

    def decoded(self, result: Any) -> tuple[np.ndarray, np.ndarray]:
        """The result with zeros, and where it stores, by its indices sorted."""
        levels = getattr(result, "levels", None) or [result[:2]]
        kinds, index = self.of
        shape = [self.sizes[x] for x in index]
        sparse = len(kinds.rstrip("d"))
        roots = shape[0] if kinds[0] == "d" else 1
        ix = [np.arange(roots)]
        for ptr, idx in levels:
            assert len(ptr) == len(ix[0]) + 1 and ptr[0] == 0 and ptr[-1] == len(idx)
            counts = np.diff(ptr)
            ix = [*(x[np.repeat(np.arange(len(counts)), counts)] for x in ix), np.asarray(idx)]
            assert (np.diff(np.lexsort(ix[::-1])) == 1).all(), "sorted"
            assert len(set(zip(*map(np.ndarray.tolist, ix), strict=True))) == len(ix[0])
        ix = tuple(ix if kinds[0] == "d" else ix[1:])
        dense, mask = np.zeros(shape), np.zeros(shape[:sparse], bool)
        dense[ix], mask[ix] = result.values, True
        order = np.argsort([*index])
        return dense.transpose(order), mask.transpose(np.argsort([*index[:sparse]]))
