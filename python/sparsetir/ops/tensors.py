"""Torch tensors as operands of kernels: launching kernels and plans, supported types, records, and
checks."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
import tvm_ffi
from torch import Tensor
from tvm.target import Target

from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.planning.plan import plan_of, requested
from sparsetir.planning.request import default_threads
from sparsetir.planning.run_plan import GPU_ALIGNMENT, Plan, finder
from sparsetir.records.records import (
    by_record,
    recorded_config,
    recorded_configs,
    there_are_records,
)
from sparsetir.records.task import Config, Sizes, Task
from sparsetir.runtime.arrays import dtype_name
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.refusals import wrong
from sparsetir.schedules.operators.problems import CsrPattern, Problem
from sparsetir.schedules.targets import resolve_target
from sparsetir.sparse_ir.errors import StructureError, StructureIndexError, StructureTypeError

DTYPES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float64: "float64",
}
INDEX_DTYPES = (torch.int32, torch.int64)
SIZES = (int, torch.SymInt, np.integer)


def launch(kernel: Kernel, named: Mapping[str, Tensor | float | None]) -> None:
    """Run a kernel on matching tensors and numbers, by the names of its parameters.

    named : includes either all parameters that the kernel can compute itself, or none
    """
    names, run = kernel.signature.names, kernel.run
    if kernel.computed and named.keys() >= {*kernel.signature.passed}:
        names, run = kernel.signature.passed, kernel.run_unchecked
    args = [plain_tensor(x) if isinstance(x, Tensor) else x for x in map(named.get, names)]
    device = next(x.device for x in args if isinstance(x, Tensor))
    with nullcontext() if device.type == "cpu" else _on(device):
        run(args)


def kernel_by(
    choose: Callable[..., Config], problem: Problem, target: Target, *options: Hashable
) -> Kernel:
    """The kernel of the config that `choose` returns for a problem, a target and options."""
    return _finder(choose, problem, target, *options)()


@lru_cache(512)
def _finder(
    choose: Callable[..., Config], problem: Problem, target: Target, *options: Hashable
) -> Callable[[], Kernel]:
    return finder(choose(problem, target, *options), problem, target)


def call_plan(run: Plan, operands: Sequence[Tensor], values: Tensor | None) -> Tensor:
    """Run a plan on operands that fit it."""
    plain = [plain_tensor(x) for x in operands]
    values = None if values is None else plain_tensor(values)
    with nullcontext() if plain[0].is_cpu else _on(plain[0].device):
        out = run.repeat(plain, values)
        return run(*plain, values=values) if out is None else out


def _on(device: torch.device) -> AbstractContextManager[object]:
    """The device, on torch's current stream."""
    both = ExitStack()
    both.enter_context(torch.cuda.device(device))
    both.enter_context(tvm_ffi.use_torch_stream())
    return both


def plain_tensor(x: Tensor) -> Tensor:
    """Detach x and make it contiguous, without lazy negation or zeros, as kernels read it."""
    if x.requires_grad:
        x = x.detach()
    if x.is_neg():
        x = x.resolve_neg()
    if x._is_zerotensor():
        x = x.clone()
    if not x.is_contiguous():
        x = x.contiguous()
    return x if x.is_cpu or x.data_ptr() % GPU_ALIGNMENT == 0 else x.clone()


def wide_tensor(x: Tensor) -> Tensor:
    """Convert x to the accumulator's type, float32 at least; contiguous."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.detach().resolve_neg().to(wide).contiguous()


@cache
def target_of(device: torch.device) -> Target:
    """The target of kernels on a device."""
    return resolve_target("cuda" if device.type == "cuda" else "llvm")


class Planned(NamedTuple):
    """A plan, and the order of its values.

    columns_in_order : the order of :attr:`Structure.with_columns_in_order`. That structure is not
        kept here: objects that a structure keeps must not refer to it, or dropping it from the
        cache would free nothing
    in_blocks : block by block, as `Structure.blocks` arranges them
    """

    plan: Plan
    columns_in_order: bool = False
    in_blocks: bool = False


def recorded(
    pattern: CsrPattern,
    in_order: Callable[[], CsrPattern],
    op: str,
    feat: int,
    ones: bool,
    **options: object,
) -> Planned | None:
    """The plan with the config recorded for a pattern; None if none applies.

    pattern : without duplicates, like the tuned ones; columns of a row may be in any order
    in_order : returns the pattern with sorted columns, for a pattern without
    ones : whether runs have no values, so that ones are arranged for the config once. Values would
        be arranged in each run, which costs more than most configs save and was not timed in
        tuning: configs that need it do not apply to them
    options : dtype, reduce, heads and target, as for :func:`sparsetir.plan`
    """
    if not there_are_records():
        return None
    task = _task(op, pattern.shape, pattern.nnz, feat, **options)

    def planned(config: Config) -> Planned | None:
        resorted = not pattern.increases
        matrix: Any = in_order() if resorted else pattern
        if ones:
            matrix = SparseMatrix.from_csr(matrix.indptr, matrix.indices, shape=matrix.shape)
        else:
            config = getattr(config, "unpacked", config)
        plan = plan_of(requested(op, matrix, feat, **options), config)
        plan.chosen_by = "record"
        arranged = plan.needs_values and plan.arranges_values
        return None if arranged else Planned(plan, resorted)

    return by_record(recorded_config(task, lambda: pattern.in_order), planned)


def may_be_recorded(
    op: str, shape: tuple[int, int], nnz: int, feat: int, **options: object
) -> bool:
    """Whether there are records for patterns of about these sizes; options : see `recorded`."""
    return there_are_records() and bool(recorded_configs(_task(op, shape, nnz, feat, **options)))


def _task(op: str, shape: tuple[int, int], nnz: int, feat: int, **options: Any) -> Task:
    return Task(op, Sizes(shape, nnz), feat, threads=default_threads(), **options)


# -- refusals --------------------------------------------------------------------------------------


if TYPE_CHECKING:
    from sparsetir.ops.structure import Structure


def check_strided(caller: str, name: str, x: object, what: str = "a tensor") -> Tensor:
    """Return x; raise unless it is a dense tensor; what : the expectation, for the error."""
    if not isinstance(x, Tensor):
        raise wrong(caller, name, what, type(x).__name__, TypeError)
    if x.is_nested or x.layout is not torch.strided:
        got = "a nested one" if x.is_nested else x.layout
        raise wrong(caller, name, "a dense tensor", got, TypeError)
    return x


def check_tensor(
    caller: str, name: str, x: object, like: Tensor | None = None, other: str = "the other operand"
) -> Tensor:
    """Return x; raise unless it is a dense tensor of a supported dtype.

    like : an operand checked before, whose dtype x must have unless autocast casts both
    other : a phrase for that operand
    """
    x = check_strided(caller, name, x)
    if x.dtype not in DTYPES:
        raise wrong(caller, name, ", ".join(DTYPES.values()), dtype_name(x), TypeError)
    if like is not None and x.dtype != like.dtype and not torch.is_autocast_enabled(x.device.type):
        raise wrong(caller, name, f"{dtype_name(like)} as {other}", dtype_name(x), TypeError)
    return x


def check_rows(
    caller: str,
    name: str,
    x: Tensor,
    device: torch.device,
    rows: int,
    said: str = "to fit the sparse matrix",
) -> None:
    """Raise unless x is on `device` and has `rows` rows; said : the reason, for the error."""
    if x.device != device:
        raise wrong(caller, name, f"to be on {device} as the sparse matrix", x.device)
    if x.shape[0] != rows:
        second = "; heads are the second dimension" if x.dim() == 3 and x.shape[1] == rows else ""
        raise wrong(caller, name, f"{rows} rows {said}", f"shape {tuple(x.shape)}{second}")


def check_dense(
    caller: str, name: str, x: Tensor, structure: Structure, rows: int, like: Tensor | None = None
) -> None:
    """Raise unless x is (rows, feat) or (heads, rows, feat), of a supported dtype.

    like : an operand checked before, whose dtype and other sizes x must have
    """
    check_tensor(caller, name, x)
    if x.device != structure.device:
        raise wrong(caller, name, f"to be on {structure.device} as the pattern", x.device)
    if x.dim() not in (2, 3) or x.shape[-2] != rows:
        raise ValueError(
            f"{caller}: argument '{name}': expected shape ({rows}, feat) or (heads, {rows}, feat) "
            f"for a pattern of shape {structure.shape}, got {tuple(x.shape)}"
        )
    if like is None:
        return
    if x.dtype != like.dtype:
        raise wrong(caller, name, dtype_name(like), dtype_name(x), TypeError)
    if x.dim() != like.dim() or x.shape[:-2] != like.shape[:-2] or x.shape[-1] != like.shape[-1]:
        raise wrong(
            caller, name, f"shape {(*like.shape[:-2], rows, like.shape[-1])}", tuple(x.shape)
        )


def check_values(caller: str, values: Tensor, dense: Tensor, structure: Structure) -> None:
    """Raise unless values are (nnz,), or (heads, nnz) if the dense operand has heads."""
    expected = (*dense.shape[:-2], structure.nnz)
    check_strided(caller, "values", values)
    if values.dtype != dense.dtype:
        as_dense = f"{dtype_name(dense)} as the dense operand"
        raise wrong(caller, "values", as_dense, dtype_name(values), TypeError)
    if values.device != structure.device:
        raise wrong(caller, "values", f"to be on {structure.device} as the pattern", values.device)
    if tuple(values.shape) != expected:
        raise wrong(caller, "values", f"shape {expected}", tuple(values.shape))


def scale_of(caller: str, scale: object, feat: int) -> float:
    """The factor of attention scores; TypeError for a scale that is not a number."""
    if scale is None:
        return 1 / math.sqrt(max(1, feat))
    if not isinstance(scale, numbers.Real):
        raise wrong(caller, "scale", "a number", type(scale).__name__, TypeError)
    return float(scale)


def check_size(caller: str, name: str, size: object, least: int = 0) -> int:
    """Check a number, as of rows or columns (TypeError, ValueError), and return it."""
    if type(size) is int and least <= size < 2**63:  # the fast path
        return size
    if isinstance(size, bool) or not isinstance(size, SIZES):
        raise TypeError(f"{caller}: argument '{name}': expected an integer, got {size!r}")
    # Compiled code may not know the size.
    if not torch.compiler.is_compiling() and not least <= size < 2**63:
        expected = f"{least} or more" if size < least else "less than 2**63"
        raise ValueError(f"{caller}: argument '{name}': expected {expected}, got {size}")
    return int(size) if isinstance(size, np.integer) else cast(int, size)


def check_csr(
    caller: str, rowptr: Tensor, col: Tensor, n: int, names: tuple[str, ...] = ("rowptr", "col")
) -> None:
    """Raise unless rowptr (m + 1,) and col (nnz,) are compressed rows of an (m, n) matrix."""
    pointers, indices = names
    check_kind(caller, pointers, rowptr)
    check_kind(caller, indices, col)
    _check_together(caller, rowptr, col, names)
    if rowptr.dim() != 1 or not len(rowptr):
        raise wrong(caller, pointers, "shape (m + 1,)", tuple(rowptr.shape), StructureError)
    if col.dim() != 1:
        raise wrong(
            caller, indices, "shape (nnz,), or (2, nnz) for edges", tuple(col.shape), StructureError
        )
    first, last = int(rowptr[0]), int(rowptr[-1])
    if first != 0 or last != len(col):
        raise wrong(
            caller,
            pointers,
            f"to go from 0 to nnz = {len(col)}",
            f"{first} to {last}",
            StructureError,
        )
    falls = torch.nonzero(rowptr[1:] < rowptr[:-1])
    if len(falls):
        row = int(falls[0])
        raise StructureError(
            f"{caller}: argument '{pointers}': expected not to decrease, got {int(rowptr[row])} at "
            f"{row} and {int(rowptr[row + 1])} at {row + 1}"
        )
    check_range(caller, indices, "index", col, n)


def check_edges(caller: str, edges: Tensor, m: int, n: int, name: str = "edges") -> None:
    """Raise unless `edges` are (2, nnz) columns and rows of an (m, n) matrix."""
    check_pairs(caller, edges, name)
    if m == n and edges.numel():  # one pass for both ends
        low, high = (int(v) for v in torch.aminmax(edges))
        if low >= 0 and high < n:
            return
    check_range(caller, name, "source", edges[0], n)
    check_range(caller, name, "target", edges[1], m)


def check_pairs(caller: str, edges: Tensor, name: str = "edges") -> None:
    """Raise unless `edges` are (2, nnz) integers."""
    check_kind(caller, name, edges)
    if edges.dim() != 2 or len(edges) != 2:
        raise wrong(caller, name, "shape (2, nnz)", tuple(edges.shape), StructureError)


def check_kind(caller: str, name: str, x: Tensor) -> None:
    """Raise unless x is a dense tensor of int32 or int64."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        got = x.layout if isinstance(x, Tensor) else type(x).__name__
        raise wrong(caller, name, "a dense tensor", got, StructureTypeError)
    if x.requires_grad:
        raise StructureTypeError(
            f"{caller}: argument '{name}': expected int32 or int64, got {dtype_name(x)} that "
            "requires a gradient: a pattern has none, its values may"
        )
    if x.dtype not in INDEX_DTYPES:
        raise wrong(caller, name, "int32 or int64", dtype_name(x), StructureTypeError)


def _check_together(caller: str, rowptr: Tensor, col: Tensor, names: tuple[str, ...]) -> None:
    pointers, indices = names
    if rowptr.device != col.device:
        raise wrong(
            caller, indices, f"to be on {rowptr.device} as '{pointers}'", col.device, StructureError
        )
    if rowptr.dtype != col.dtype:
        expected = f"{dtype_name(rowptr)} as '{pointers}'"
        raise wrong(caller, indices, expected, dtype_name(col), StructureTypeError)


def check_range(caller: str, name: str, what: str, x: Tensor, size: int) -> None:
    """Raise unless 0 <= x < size everywhere; what : a noun for its elements, for the error."""
    if not len(x):
        return
    low, high = (int(v) for v in torch.aminmax(x))
    if low < 0 or high >= size:
        got = low if low < 0 else high
        expected = f"each {what} to be at least 0 and less than {size}"
        raise wrong(caller, name, expected, got, StructureIndexError)
