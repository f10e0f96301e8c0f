"""Rules from a list of axes, instead of a description as a `T.prim_func`.

Descriptions are created as nodes, without text to parse: a hyb of many parts has many rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import ir, tirx

from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.sparse_ir.nodes import Axis, SparseBuffer, SparseFunc, buffer_var, make_func


@dataclass(frozen=True)
class Operand:
    """The buffers that a format stores: some of a program's, over the same axes.

    Parameters
    ----------
    buffers : mapping of str to str, or pairs
        Dtypes by name.
    axes : tuple of str
        Names of their axes in the program.
    idtype : {"int32", "int64"}
        Index type of the new axes.
    tag : str
        A suffix of rule names, for programs that use a format twice.
    """

    buffers: Any = (("A", "float32"),)
    axes: tuple[str, ...] = ("I", "J")
    idtype: str = "int32"
    tag: str = ""

    def __post_init__(self) -> None:
        pairs = self.buffers.items() if isinstance(self.buffers, Mapping) else self.buffers
        object.__setattr__(self, "buffers", tuple((str(n), str(d)) for n, d in pairs))
        object.__setattr__(self, "axes", tuple(self.axes))
        if self.idtype not in ("int32", "int64"):
            raise ValueError(
                "Operand: argument 'idtype': expected 'int32' or 'int64', got " + repr(self.idtype)
            )

    @classmethod
    def default(cls, order: int, dtype: str = "float32", idtype: str = "int32") -> Operand:
        """A buffer A over as many of the axes I, J, K, ... as a tensor has.

        Parameters
        ----------
        order : int
            Number of axes.
        dtype, idtype : str
            Type of the buffer, and index type of the new axes.

        Returns
        -------
        Operand
        """
        return cls({"A": dtype}, tuple("IJKLMNOP"[:order]), idtype)

    @classmethod
    def of(cls, func: SparseFunc, *names: str, tag: str = "") -> Operand:
        """Buffers of a function by name; they must have the same axes.

        Parameters
        ----------
        func : SparseFunc
            A stage-I function.
        *names : str
            Names of the buffers.
        tag : str
            The suffix of rule names.

        Returns
        -------
        Operand
        """
        buffers = [func.buffer(n) for n in names]
        axes = [tuple(a.name for a in b.axes or ()) for b in buffers]
        if not buffers or any(a != axes[0] for a in axes) or not axes[0]:
            raise ValueError(
                f"Operand.of: argument 'names': expected sparse buffers of '{func.name}' over the "
                f"same axes, got {dict(zip(names, axes, strict=True))}"
            )
        idtypes = {a.idtype for a in buffers[0].axes or ()}
        return cls(
            {b.name: b.dtype for b in buffers},
            axes[0],
            "int64" if "int64" in idtypes else "int32",
            tag,
        )


@dataclass(frozen=True)
class AxisSpec:
    """An axis of a description, the result of `dense`, `sparse`, `fixed` or `ragged`."""

    name: str
    kind: str
    length: int | None = None
    under: str | None = None
    slots: int | None = None
    unique: bool = True


def dense(name: str, length: int | None = None) -> AxisSpec:
    """A dense_fixed axis.

    Parameters
    ----------
    name : str
        Name of the axis.
    length : int, optional
        Length of the axis; by default a parameter `n_<axis>`.

    Returns
    -------
    AxisSpec
    """
    return AxisSpec(name, "dense_fixed", length)


def sparse(name: str, under: str, length: int | None = None, unique: bool = True) -> AxisSpec:
    """A sparse_variable axis: parameters `indptr_<axis>`, `indices_<axis>`, `nnz_<axis>`.

    Parameters
    ----------
    name, under : str
        Names of the axis and of its parent.
    length : int, optional
        Length of the axis; by default a parameter `n_<axis>`.
    unique : bool
        Whether coordinates under one parent differ.

    Returns
    -------
    AxisSpec
    """
    return AxisSpec(name, "sparse_variable", length, under, unique=unique)


def fixed(
    name: str, under: str, length: int | None = None, slots: int | None = None, unique: bool = True
) -> AxisSpec:
    """A sparse_fixed axis, with a parameter `indices_<axis>`.

    Parameters
    ----------
    name, under : str
        Names of the axis and of its parent.
    length : int, optional
        Length of the axis; by default a parameter `n_<axis>`.
    slots : int, optional
        Slots under each parent; by default a parameter `cols_<axis>`.
    unique : bool
        Whether coordinates under one parent differ.

    Returns
    -------
    AxisSpec
    """
    return AxisSpec(name, "sparse_fixed", length, under, slots, unique)


def ragged(name: str, under: str, length: int | None = None) -> AxisSpec:
    """A dense_variable axis: parameters `indptr_<axis>`, `nnz_<axis>`.

    Parameters
    ----------
    name, under : str
        Names of the axis and of its parent.
    length : int, optional
        Length of the axis; by default a parameter `n_<axis>`.

    Returns
    -------
    AxisSpec
    """
    return AxisSpec(name, "dense_variable", length, under)


def table(values: Sequence[int], index: Any) -> Any:
    """`values[index]` of a constant table, in a form allowed in maps: a sum of steps.

    index : 0 .. len(values) - 1; a number, a NumPy array or an expression

    Step t is 1 from `index` = t on: (index + count - t) // count.
    """
    count, out = len(values), values[0]
    for t in range(1, count):
        if values[t] != values[t - 1]:
            out = out + (values[t] - values[t - 1]) * ((index + (count - t)) // count)
    return out


def make_rule(
    name: str,
    operand: Operand,
    axes: Sequence[AxisSpec],
    axis_map: Mapping[str, Sequence[str]],
    idx_map: Callable[..., Any],
    inv_idx_map: Callable[..., Any],
    encoded: Mapping[str, tuple[str, Sequence[str]]] | None = None,
    decode: Callable[..., Any] | None = None,
    encode: Callable[..., Any] | None = None,
) -> FormatRewriteRule:
    """The rule `name` (with the operand's tag) for an operand; its buffers are over all the axes.

    Parameters
    ----------
    name : str
        Name of the rule.
    operand : Operand
        The buffers.
    axes : sequence of AxisSpec
        Axes of the format, results of :func:`dense`, :func:`fixed` and :func:`sparse`.
    axis_map, idx_map, inv_idx_map, decode, encode
        See :class:`sparsetir.FormatRewriteRule`.
    encoded : mapping of str to (str, sequence of str), optional
        With `decode`: dtype and axes of each buffer that is stored instead of the operand's first
        one; axes that only these have are not in `axis_map`.

    Returns
    -------
    FormatRewriteRule
        A rule that is `whole`. A buffer's handle has its name in lower case, if these differ.
        The parameters are, in order: handles of buffers, index arrays, sizes.
    """
    idtype, nodes, encoded = operand.idtype, {}, encoded or {}
    rewritten = [b for b, _ in operand.buffers]
    names = [*rewritten[bool(encoded) :], *encoded]
    low = [b.lower() for b in names]
    handles = {b: _handle(n if low.count(n) == 1 else b) for b, n in zip(names, low, strict=True)}
    arrays: list[Any] = []
    sizes: list[Any] = []

    def array(what: str) -> Any:
        arrays.append(_handle(what))
        return arrays[-1]

    def size(what: str, constant: int | None = None) -> Any:
        if constant is not None:
            return tirx.IntImm(idtype, constant)
        sizes.append(tirx.Var(what, idtype))
        return sizes[-1]

    for spec in axes:
        low = spec.name.lower()
        more: dict[str, Any] = {}
        if spec.under is not None:
            more["parent"] = nodes[spec.under]
        if spec.kind.endswith("variable"):
            more["indptr"] = array(f"indptr_{low}")
        if spec.kind.startswith("sparse"):
            more["indices"] = array(f"indices_{low}")
        more["length"] = size(f"n_{low}", spec.length)
        if spec.kind.endswith("variable"):
            more["nnz"] = size(f"nnz_{low}")
        if spec.kind == "sparse_fixed":
            more["nnz_cols"] = size(f"cols_{low}", spec.slots)
        nodes[spec.name] = Axis(
            name=spec.name, kind=spec.kind, idtype=idtype, unique=spec.unique, **more
        )
    mapped = {n for new in axis_map.values() for n in new}
    after = [n for n in nodes if n in mapped or not encoded]
    stored = {b: (dtype, after) for b, dtype in operand.buffers} | dict(encoded)
    buffers = [
        SparseBuffer(
            var=buffer_var([nodes[n].length for n in over], dtype, b),
            axes=[nodes[n] for n in over],
            handle=handles.get(b),
        )
        for b, (dtype, over) in stored.items()
    ]
    params = [*handles.values(), *arrays, *sizes]
    full_name = f"{name}{operand.tag}"
    desc = make_func(
        full_name, params, list(nodes.values()), buffers, tirx.Evaluate(tirx.IntImm("int32", 0))
    )
    return FormatRewriteRule(
        full_name, desc, rewritten, list(operand.axes), after, dict(axis_map), idx_map, inv_idx_map,
        whole=True, decode=decode, encode=encode,
    )  # fmt: skip


def row_pieces(
    name: str, operand: Operand, axes: Sequence[str], slots: int, unique: bool = False
) -> FormatRewriteRule:
    """The rule `name` of a matrix as pieces of rows: the row of each, and the columns in its slots.

    axes : names of the new axes: a root of length 1, the pieces, their slots
    unique : whether a row has at most one piece
    """
    i, j = operand.axes
    root, row, col = axes
    return make_rule(
        name, operand,
        [dense(root, 1), sparse(row, root, unique=unique), fixed(col, row, slots=slots)],
        {i: [root, row], j: [col]},
        lambda i, j: (0, i, j), lambda o, i, j: (i, j),
    )  # fmt: skip


def _handle(name: str) -> Any:
    return ir.Var(name, ir.PointerType(ir.PrimType("void")))
