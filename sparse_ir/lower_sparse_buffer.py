"""Sparse buffer lowering: stage II to stage III (SparseTIR, section 3.4.1).

Every buffer over axes becomes one-dimensional. Before::

    C[vi, vk] = C[vi, vk] + A[vi, vj] * B[J_indices[vi, vj], vk]

After (offsets that a product of sizes could carry past 2^31 are 64-bit)::

    C[int64(vi) * feat + vk] = C[...] + A[J_indptr[vi] + vj] * B[int64(J_indices[...]) * feat + vk]

The offset of an element sums, over the axis trees of the buffer, the offset within the tree times
the sizes of the trees after it (equations 6 to 8; trees are ordered by their roots).
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, s_tir, tirx
from tvm.sym import Analyzer

from sparsetir.sparse_ir.allocations import allocate_outside_of_threads
from sparsetir.sparse_ir.errors import LoweringError
from sparsetir.sparse_ir.hoist_init import hoist_init
from sparsetir.sparse_ir.nodes import buffer_var, nodes_of, same_indices, substitute
from sparsetir.sparse_ir.position_space import (
    LAYOUTS,
    SIGNATURE,
    STAGE_TWO_ATTRS,
    Layout,
    positional_size,
)
from sparsetir.sparse_ir.promises import promised_steps
from sparsetir.sparse_ir.races import RACES
from sparsetir.sparse_ir.row_bounds import keep_in_rows
from sparsetir.sparse_ir.storage import Storage
from sparsetir.sparse_ir.tir import as_dtype, block_with, dtype_of, free_vars, is_one, pass_on
from sparsetir.sparse_ir.traversal import access_rules, map_expr


def lower_sparse_buffer(func_or_mod: Any) -> Any:
    """Lower a stage-II function, scheduled or not, to plain TIR over flat buffers.

    Parameters
    ----------
    func_or_mod : PrimFunc, tvm.s_tir.Schedule or IRModule
        From :func:`lower_sparse_iter`, or a schedule of such a function, or a module, whose
        stage-II functions are lowered and others kept.

    Returns
    -------
    PrimFunc or IRModule
        Accepted by `tvm.compile`; it has no sparse constructs left.
    """
    if isinstance(func_or_mod, s_tir.Schedule):
        functions = list(func_or_mod.mod.functions.values())
        if len(functions) != 1:
            return LowerSparseBuffer()(func_or_mod.mod)
        return lower_sparse_buffer(functions[0])
    if isinstance(func_or_mod, tvm.IRModule):
        return LowerSparseBuffer()(func_or_mod)
    if not isinstance(func_or_mod, tirx.PrimFunc):
        raise TypeError(
            "lower_sparse_buffer: argument 'func_or_mod': expected a stage-II PrimFunc, a "
            f"Schedule or an IRModule, got {type(func_or_mod).__name__}"
        )
    if LAYOUTS not in func_or_mod.attrs:
        return func_or_mod
    return _Flattening(hoist_init(func_or_mod)).run()


def LowerSparseBuffer() -> Any:
    """The pass: :func:`lower_sparse_buffer` on every stage-II function of a module."""

    return pass_on("sparsetir.LowerSparseBuffer", tirx.PrimFunc, lower_sparse_buffer)


class _Flattening:
    def __init__(self, func: tirx.PrimFunc) -> None:
        self.func, self.named = func, {p.name: p for p in func.params}
        layouts = {str(k): v for k, v in func.attrs[LAYOUTS].items()}
        self.flat: dict[Any, Any] = {}
        self.storage: dict[Any, Storage] = {}
        self.bounds = {  # the most positions under one parent, by the name of the indptr
            str(name): self._rename(positional_size(axis))
            for layout in layouts.values()
            for axis, name in zip(layout.axes, layout.indptr, strict=True)
            if name
        }
        by_name: dict[str, Any] = {}
        buffers = self._buffers(layouts)
        self.layouts = {var: layouts[name] for name, var in buffers}
        self.indptr = {name: var for name, var in buffers if layouts[name].ends}
        steps = promised_steps(func.attrs[SIGNATURE])
        for name, var in buffers:
            storage = Storage(layouts[name], by_name, self._rename, steps)
            by_name[name] = buffer_var(
                [storage.size()], var.ty.dtype, name, var.ty.storage_scope, _element_bytes(var)
            )
            self.flat[var] = by_name[name]
            self.storage[var] = storage

    def run(self) -> tirx.PrimFunc:
        matches = self._check_matches()
        body, self.threads = allocate_outside_of_threads(self.func.body, self.layouts)
        for var in self.threads:
            size, align = self._size(var), _element_bytes(var)
            self.flat[var] = buffer_var([size], var.ty.dtype, var.name, align=align)
        body = keep_in_rows(body, self.layouts, self.indptr)
        body = substitute(body, self._bounded_caches())
        if matches:
            body = map_expr(body, [(s_tir.SBlock, self._inline_matches)])
        body = map_expr(
            body,
            [
                *access_rules(self._access),
                (ir.TensorRegion, self._region),
                (s_tir.SBlock, self._allocs),
            ],
        )
        params = [self.flat.get(p, self._aligned(p)) for p in self.func.params]
        body = substitute(body, {**self.flat, **dict(zip(self.func.params, params, strict=True))})
        attrs = {k: v for k, v in self.func.attrs.items() if str(k) not in STAGE_TWO_ATTRS}
        return tirx.PrimFunc(
            params,
            body,
            ret_type=self.func.ret_type,
            attrs=tvm.ir.make_node("ir.DictAttrs", **attrs),
            span=self.func.span,
        )

    def _buffers(self, layouts: dict[str, Layout]) -> list[tuple[str, Any]]:
        """The function's variables for the buffers that have a layout, index arrays first.

        Each version of a function has its own workspace of the same name.
        """
        by_name: dict[str, list[Any]] = {}
        params = [p for p in self.func.params if tirx.is_buffer_var(p)]
        candidates = [*params]
        for block in nodes_of(s_tir.SBlock, self.func.body):
            candidates += [v for v in block.alloc_buffers if v.ty.storage_scope in ("", "global")]
        for var in candidates:
            layout = layouts.get(var.name)
            if layout is None or len(var.ty.shape) != len(layout.axes):
                continue
            first, *_ = known = by_name.setdefault(var.name, [var])
            if any(var.same_as(x) for x in known):
                continue
            known.append(var)
            if any(first.same_as(p) for p in params) or not same_indices(
                first.ty.shape, var.ty.shape
            ):
                raise LoweringError(
                    f"{self._name()}: two buffers are called '{var.name}'; "
                    "a schedule must not reuse the name of a sparse buffer"
                )
        order = [n for n in layouts if layouts[n].ends]
        order.sort(key=lambda n: len(layouts[n].axes))
        names = [*order, *(n for n in layouts if n not in order)]
        return [(n, var) for n in names for var in by_name.get(n, [])]

    def _bounded_caches(self) -> dict[Any, Any]:
        """Allocations as long as a row, enlarged to a bound of all rows: TVM has no loads there.

        A cache of a ragged buffer is such an allocation; TVM compacts it to the part used.
        """
        bounded: dict[Any, Any] = {}
        for block in nodes_of(s_tir.SBlock, self.func.body):
            for var in block.alloc_buffers:
                shape = [self._longest(d) for d in var.ty.shape]
                if any(not new.same_as(old) for new, old in zip(shape, var.ty.shape, strict=True)):
                    bounded[var] = buffer_var(shape, var.ty.dtype, var.name, var.ty.storage_scope)
        return bounded

    def _longest(self, extent: Any) -> Any:
        """An extent with each row length in it replaced by a bound for all rows."""
        ends = nodes_of(ir.TensorLoad, extent)
        analyzer = Analyzer()

        def end(node: Any) -> Any:
            """Replace indptr[..., x + 1] by indptr[..., x] plus the bound if both occur."""
            bound = self.bounds.get(node.source.name)
            before = [*list(node.indices)[:-1], node.indices[-1] - 1]
            for other in ends if bound is not None else []:
                if other.source.same_as(node.source) and all(
                    analyzer.can_prove_equal(a, b)
                    for a, b in zip(other.indices, before, strict=True)
                ):
                    return other + as_dtype(bound, dtype_of(node))
            return node

        return analyzer.simplify(map_expr(extent, [(ir.TensorLoad, end)])) if ends else extent

    def _name(self) -> str:
        attrs = self.func.attrs
        return str(attrs["global_symbol"]) if "global_symbol" in attrs else "main"

    def _rename(self, expr: Any) -> Any:
        """Replace sizes from attributes, which name the parameters before scheduling."""
        sizes, named = free_vars(expr), self.named
        return substitute(expr, {v: named[v.name] for v in sizes if v.name in named})

    def _aligned(self, param: Any) -> Any:
        """A dense buffer parameter aligned to no more than its element size."""
        if not tirx.is_buffer_var(param):
            return param
        ty = param.ty
        return buffer_var(ty.shape, ty.dtype, param.name, ty.storage_scope, _element_bytes(param))

    def _access(self, var: Any, indices: Any) -> tuple[Any, list[Any]] | None:
        return (self.flat[var], [self._offset(var, [*indices])]) if var in self.storage else None

    def _offset(self, var: Any, indices: list[Any]) -> Any:
        """The offset of an element of a buffer."""
        offset = self.storage[var].offset(indices)
        if var not in self.threads:
            return offset
        size = as_dtype(self.storage[var].size(), "int64")
        return self.threads[var].number * size + as_dtype(offset, "int64")

    def _size(self, var: Any) -> Any:
        """The size of a buffer, in elements."""
        size = self.storage[var].size()
        if var not in self.threads:
            return size
        return as_dtype(size, "int64") * self.threads[var].count

    def _region(self, node: Any) -> Any:
        storage = self.storage.get(node.source)
        if storage is None:
            return node
        if all(is_one(r.extent) for r in node.region):
            first = self._offset(node.source, [r.min for r in node.region])
            ranges = [ir.Range.from_min_extent(first, as_dtype(1, dtype_of(first)))]
        else:
            size = self._size(node.source)
            ranges = [ir.Range.from_min_extent(as_dtype(0, dtype_of(size)), size)]
        return tirx.BufferRegion(self.flat[node.source], ranges)

    def _allocs(self, block: Any) -> Any:
        if not any(v in self.flat for v in block.alloc_buffers) and RACES not in block.annotations:
            return block
        allocs = [self.flat.get(v, v) for v in block.alloc_buffers]
        annotations = {k: v for k, v in block.annotations.items() if k != RACES}
        return block_with(block, alloc_buffers=allocs, annotations=annotations)

    def _check_matches(self) -> bool:
        """Whether blocks match regions of buffers, of sparse ones only in dense dimensions."""
        blocks = nodes_of(s_tir.SBlock, self.func.body)
        matches = [match for block in blocks for match in block.match_buffers]
        for match in matches:
            storage = self.storage.get(match.source.source)
            if storage is None:
                continue
            dims = storage.axes[len(storage.axes) - len(match.buffer.ty.shape) :]
            if any(a not in storage.leaves for a in dims):
                raise LoweringError(
                    f"{self._name()}: a region of '{match.source.source.name}' is matched across "
                    "a ragged dimension"
                )
        return bool(matches)

    def _inline_matches(self, block: Any) -> Any:
        """Resolve `T.match_buffer` of regions of sparse buffers, as tensor intrinsics make them."""
        matches = [m for m in block.match_buffers if m.source.source in self.storage]
        if not matches:
            return block
        body, init = block.body, block.init
        for match in matches:
            mapping, rules = self._matched(match)
            body = substitute(map_expr(body, rules), mapping)
            if init is not None:
                init = substitute(map_expr(init, rules), mapping)
        rest = [m for m in block.match_buffers if m.source.source not in self.storage]
        return block_with(block, body=body, init=init, match_buffers=rest)

    def _matched(self, match: Any) -> tuple[dict[Any, Any], list[Any]]:
        """Values for the variables of a matched buffer, and rewrite rules for its accesses."""
        source, target = match.source.source, match.buffer
        storage, ty = self.storage[source], target.ty
        stride_of = {a.name: s for a, s in zip(storage.leaves, storage.strides, strict=True)}
        dims = storage.axes[len(storage.axes) - len(ty.shape) :]
        strides = [stride_of[a.name] for a in dims]
        offset = self._offset(source, [r.min for r in match.source.region])
        mapping: dict[Any, Any] = {target: self.flat[source]}
        for have, want in [(ty.elem_offset, offset), *zip(ty.strides, strides, strict=False)]:
            if isinstance(have, ir.Var):
                mapping[have] = as_dtype(want, dtype_of(have))

        def place(buffer: Any, index: Any) -> Any:
            if not buffer.same_as(target):
                return None
            at = offset
            for i, stride in zip(index, strides, strict=True):
                at = at + as_dtype(i, dtype_of(offset)) * as_dtype(stride, dtype_of(offset))
            return self.flat[source], [at]

        def region(node: Any) -> Any:
            if not node.source.same_as(target):
                return node
            size = self._size(source)
            whole = ir.Range.from_min_extent(as_dtype(0, dtype_of(size)), size)
            return tirx.BufferRegion(self.flat[source], [whole])

        def pointer(node: Any) -> Any:
            """Put the full offset into an address: the intrinsic's offset type may not hold it."""
            if getattr(node.op, "name", "") != "tirx.tvm_access_ptr":
                return node
            args = [offset if a.same_as(ty.elem_offset) else a for a in node.args]
            return ir.Call(node.op, args, node.attrs, node.ty_args, node.span, ret_ty=node.ty)

        return mapping, [*access_rules(place), (ir.TensorRegion, region), (ir.Call, pointer)]


def _element_bytes(var: Any) -> int:
    dtype = tvm.DataType(str(var.ty.dtype))
    return max(1, dtype.bits * dtype.lanes // 8)
