"""Format rewrite rules: the axes of a storage format, and maps of coordinates to it and back.

(SparseTIR, section 3.2.1 and appendix A.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, NoReturn

from tvm import ir, tirx

from sparsetir.sparse_ir.affine import affine, expr_of
from sparsetir.sparse_ir.nodes import Axis, SparseBuffer, SparseFunc


@dataclass(frozen=True, eq=False)
class FormatRewriteRule:
    """A rule that stores some buffers in another format.

    Parameters
    ----------
    name : str
        The suffix of the names of new axes, buffers and parameters.
    new_format_desc : SparseFunc
        A stage-I function that only declares axes and buffers.
    buffers_to_rewrite : sequence of str
        Buffers of the program; the description has one of the same name for each.
    axes_before_rewrite : sequence of str
        Their axes in the program, in order.
    axes_after_rewrite : sequence of str
        Their axes in the description, in visiting order.
    axis_map : mapping of str to sequence of str
        For each axis before, the axes after that it becomes.
    idx_map : callable
        Maps coordinates before to a tuple of coordinates after.
    inv_idx_map : callable
        Maps coordinates after to a tuple of coordinates before.
    whole : bool
        Whether lengths that are parameters are always those of the whole shape, as for the
        library's formats; see :attr:`tied`.
    decode : callable, optional
        For values of another type: the value of the one rewritten buffer that the description
        allocates, as an expression of the buffers that it stores instead (in the order of the
        description) and of coordinates after: `lambda q, scale, i, j: q[i, j].astype("float32") *
        scale[i]`.
    encode : callable, optional
        The inverse, with `decode`: from a :class:`FormatPart` and an array of values, of the part's
        shape with zeros for padding, to the arrays of the stored buffers by name.

    Raises
    ------
    ValueError
        For an invalid argument; the message names the rule and the argument.

    Notes
    -----
    Both maps are affine, with floor division and remainder by positive constants. Decomposition
    adds a parameter `mask` and a buffer `MASK`; a description may use neither name. An axis with
    `unique=False` above one with a constant number of slots repeats a coordinate when the slots
    under it are full: so rows longer than a bucket are split. (SparseTIR, sections 3.2.1 and 4.2.1,
    and appendix A.)
    """

    name: str
    new_format_desc: SparseFunc
    buffers_to_rewrite: Sequence[str]
    axes_before_rewrite: Sequence[str]
    axes_after_rewrite: Sequence[str]
    axis_map: Mapping[str, Sequence[str]]
    idx_map: Callable[..., Any]
    inv_idx_map: Callable[..., Any]
    whole: bool = False
    decode: Callable[..., Any] | None = None
    encode: Callable[[Any, Any], Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        desc = self.new_format_desc
        if not isinstance(self.name, str) or not f"_{self.name}".isidentifier():
            self._refuse("name", "letters, digits and underscores", repr(self.name))
        if not isinstance(desc, SparseFunc):
            self._refuse("new_format_desc", "a stage-I function", type(desc).__name__)
        if not isinstance(desc.body, tirx.Evaluate):
            self._refuse("new_format_desc", "axes and buffers alone", "a body with statements")
        if any(p.name == "mask" for p in desc.params) or any(
            b.name == "MASK" for b in desc.buffers
        ):
            self._refuse("new_format_desc", "no parameter 'mask' and no buffer 'MASK'", "one")
        for argument in ("buffers_to_rewrite", "axes_before_rewrite", "axes_after_rewrite"):
            names = getattr(self, argument)
            if isinstance(names, str) or len(set(names)) != len(names):
                self._refuse(argument, "a list of different names", repr(names))
        if not self.buffers_to_rewrite:
            self._refuse("buffers_to_rewrite", "at least one buffer", "none")
        after = list(self.axes_after_rewrite)
        for name in self.buffers_to_rewrite:
            buffer = next((b for b in desc.buffers if b.name == name), None)
            if buffer is None or buffer.axes is None:
                have = [b.name for b in desc.buffers]
                self._refuse("buffers_to_rewrite", f"'{name}' in the description", have)
            have = [a.name for a in buffer.axes]
            if have != after:
                self._refuse("axes_after_rewrite", f"the axes {have} of buffer '{name}'", after)
        if set(self.axis_map) != set(self.axes_before_rewrite):
            keys = list(self.axes_before_rewrite)
            self._refuse("axis_map", f"an entry for each of {keys}", list(self.axis_map))
        mapped = [a for b in self.axes_before_rewrite for a in self.axis_map[b]]
        if sorted(mapped) != sorted(after):
            self._refuse("axis_map", f"each of {after} once among its values", mapped)
        self._check_map("idx_map", self.idx_map, len(self.axes_before_rewrite), len(after))
        self._check_map("inv_idx_map", self.inv_idx_map, len(after), len(self.axes_before_rewrite))
        if self.decode is not None or self.encode is not None:
            self._check_decode()

    def axis(self, name: str) -> Axis:
        """An axis of the description.

        Parameters
        ----------
        name : str
            Name of the axis.

        Returns
        -------
        Axis
        """
        return self.new_format_desc.axis(name)

    def renamed(self, name: str) -> str:
        """The name in a decomposed program of a name in the description.

        Parameters
        ----------
        name : str
            Name of an axis, a buffer or a parameter.

        Returns
        -------
        str
        """
        return f"{name}_{self.name}"

    def to_new(self, coords: Sequence[Any]) -> tuple[Any, ...]:
        """Apply `idx_map`; the result is a tuple.

        Parameters
        ----------
        coords : sequence
            Numbers, NumPy arrays or TIR expressions.

        Returns
        -------
        tuple
        """
        return _tuple(self.idx_map(*coords))

    def to_old(self, coords: Sequence[Any]) -> tuple[Any, ...]:
        """Apply `inv_idx_map`; the result is a tuple.

        Parameters
        ----------
        coords : sequence
            Numbers, NumPy arrays or TIR expressions.

        Returns
        -------
        tuple
        """
        return _tuple(self.inv_idx_map(*coords))

    @cached_property
    def decoded(self) -> str | None:
        """The buffer whose values `decode` computes; None if all values are stored."""
        buffers = self.buffers_to_rewrite if self.decode is not None else ()
        local = (n for n in buffers if self.new_format_desc.buffer(n).handle is None)
        return next(local, None)

    @property
    def encoded(self) -> list[SparseBuffer]:
        """The buffers from which `decode` computes values, and which `encode` fills."""
        return [b for b in self.new_format_desc.buffers if b.name not in self.buffers_to_rewrite]

    @cached_property
    def masked(self) -> bool:
        """Whether a slot may be empty, so that the format needs a mask.

        Not if the new axes are one path that ends in a sparse axis: coordinates in its indices are
        stored, and a padded slot has a negative index.
        """
        return len(self.leaves) > 1 or not self.leaves[0].is_sparse

    @cached_property
    def leaves(self) -> list[Axis]:
        """The axes after without axes below, in the order of their roots."""
        axes = [self.axis(n) for n in self.axes_after_rewrite]
        parents = {a.parent.name for a in axes if a.parent is not None}
        roots = [a.name for a in axes if a.parent is None]
        leaves = [a for a in axes if a.name not in parents]
        return sorted(leaves, key=lambda a: roots.index(a.root.name))

    @cached_property
    def tied(self) -> dict[str, tuple[str, Fraction]]:
        """Axes after whose length follows from an axis before: that axis, and the ratio.

        In a rule that is `whole`, those whose coordinate is one before, its block of a constant
        size, or a multiple of it. A decomposed program takes their lengths from the axes before if
        other arrays have these lengths, too, so that a format of another size is refused.
        """
        before, after, _ = self.maps
        lengths: dict[str, tuple[str, Fraction]] = {}
        for name, expr in zip(self.axes_after_rewrite, after, strict=True):
            scaled = isinstance(expr, tirx.FloorDiv | tirx.Mul) and isinstance(expr.b, tirx.IntImm)
            by = Fraction(int(expr.b)) if scaled else Fraction(1)
            coordinate = expr.a if scaled else expr
            names = zip(self.axes_before_rewrite, before, strict=True)
            source = [n for n, v in names if v.same_as(coordinate)]
            if self.whole and source and isinstance(self.axis(name).length, ir.Var):
                lengths[name] = source[0], 1 / by if isinstance(expr, tirx.FloorDiv) else by
        return lengths

    @cached_property
    def maps(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Coordinates before as int64 variables, the image by `idx_map`, and its inverse image."""
        before = [tirx.Var(n.lower(), "int64") for n in self.axes_before_rewrite]
        after = [_int64(e) for e in self.to_new(before)]
        return before, after, [_int64(e) for e in self.to_old(after)]

    def _check_map(self, argument: str, function: Any, inputs: int, outputs: int) -> None:
        if not callable(function):
            self._refuse(argument, "a function of coordinates", repr(function))
        variables = [tirx.Var(f"c{n}", "int64") for n in range(inputs)]
        result = _tuple(self._applied(argument, function, variables, f"{inputs} coordinates"))
        if len(result) != outputs:
            self._refuse(argument, f"{outputs} coordinates", f"{len(result)}")
        for expr in result:
            if not isinstance(expr, int) and not _is_affine(expr, variables):
                self._refuse(
                    argument,
                    "affine expressions, with floor division and remainder by positive constants",
                    str(expr),
                )

    def _check_decode(self) -> None:
        for argument in ("decode", "encode"):
            if not callable(getattr(self, argument)):
                self._refuse(argument, "a function", repr(getattr(self, argument)))
        if self.decoded is None:
            have = list(self.buffers_to_rewrite)
            self._refuse("decode", "a rewritten buffer that the description allocates", have)
        axes = [self.axis(n) for n in self.axes_after_rewrite]
        inputs = [*(b.var for b in self.encoded), *(tirx.Var(a.name, a.idtype) for a in axes)]
        names = f"{[b.name for b in self.encoded]} and {len(axes)} coordinates"
        value = self._applied("decode", self.decode, inputs, names)
        dtype = self.new_format_desc.buffer(self.decoded).dtype
        if not ir.is_prim_expr(value) or str(value.ty.dtype) != dtype:
            self._refuse("decode", f"an expression of type {dtype}", value)

    def _applied(self, argument: str, function: Any, inputs: Sequence[Any], names: str) -> Any:
        try:
            return function(*inputs)
        except Exception as err:  # a user's function may raise anything
            self._refuse(argument, f"a function of {names}", f"{type(err).__name__}: {err}")

    def _refuse(self, argument: str, expected: str, got: Any) -> NoReturn:
        raise ValueError(
            f"FormatRewriteRule '{self.name}': argument '{argument}': expected {expected}, "
            f"got {got}"
        )


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _int64(value: Any) -> Any:
    return tirx.IntImm("int64", value) if isinstance(value, int) else value


def _is_affine(expr: Any, variables: Sequence[Any]) -> bool:
    terms = affine(expr).terms
    return all(len(t) < 2 and all(_is_term(expr_of(x), variables) for x in t) for t in terms)


def _is_term(expr: Any, variables: Sequence[Any]) -> bool:
    if isinstance(expr, ir.Var):
        return any(expr.same_as(v) for v in variables)
    divides = isinstance(expr, tirx.FloorDiv | tirx.FloorMod) and isinstance(expr.b, tirx.IntImm)
    return divides and int(expr.b) > 0 and _is_affine(expr.a, variables)
