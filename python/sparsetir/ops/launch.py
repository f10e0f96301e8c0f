"""How kernels and plans are run on tensors of torch, for which types, and by which records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import tvm_ffi
from torch import Tensor
from tvm.target import Target

from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.planning.plan import plan_of, requested
from sparsetir.planning.request import default_threads
from sparsetir.planning.run_plan import GPU_ALIGNMENT, Plan
from sparsetir.records.records import by_record, recorded_configs, there_are_records
from sparsetir.records.task import Sizes, Task
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.targets import resolve_target
from sparsetir.schedules.operators.problems import CsrPattern

DTYPES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float64: "float64",
}


def launch(kernel: Kernel, named: Mapping[str, Tensor | float | None]) -> None:
    """Run a kernel on tensors and numbers that fit, by the names of its parameters."""
    signature = kernel.signature
    names = signature.names if kernel.computed else signature.passed
    given = {
        name: plain_tensor(x) if isinstance(x, Tensor) else x
        for name in names
        if (x := named.get(name)) is not None
    }
    device = next(x.device for x in given.values() if isinstance(x, Tensor))
    with nullcontext() if device.type == "cpu" else _on(device):
        if kernel.computed:  # of index arrays, for which it is kept
            kernel(**given)
            return
        args = [*given.values()]
        try:
            kernel.run_unchecked(args)
        except (TypeError, ValueError, BufferError, RuntimeError) as error:
            kernel.run_refused(args, error)


def call_plan(run: Plan, operands: Sequence[Tensor], values: Tensor | None) -> Tensor:
    """A plan on operands that fit it."""
    plain = [plain_tensor(x) for x in operands]
    values = None if values is None else plain_tensor(values)
    with nullcontext() if plain[0].is_cpu else _on(plain[0].device):
        out = run.repeat(plain, values)
        return run(*plain, values=values) if out is None else out


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Where kernels run: there, on torch's current stream."""
    both = ExitStack()
    both.enter_context(torch.cuda.device(device))
    both.enter_context(tvm_ffi.use_torch_stream())
    return both


def plain_tensor(x: Tensor) -> Tensor:
    """As kernels take it, which read memory as it is, and know nothing of gradients."""
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
    """As kernels take it that compute in the type of the sums alone: float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.detach().resolve_neg().to(wide).contiguous()


@cache
def target_of(device: torch.device) -> Target:
    """What kernels are compiled for."""
    return resolve_target("cuda" if device.type == "cuda" else "llvm")


class Planned(NamedTuple):
    """A plan, and how it takes values, and gives them.

    columns_in_order : with the columns of each row in order, that of
        :attr:`Structure.with_columns_in_order`. Which is not kept here: what a structure keeps must
        not refer to it, or nothing would be freed when its cache drops it
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
    """The plan with the config that is recorded for a pattern; None where none applies.

    pattern : may have the columns of a row in any order, but each once, as what is tuned has
    in_order : gives it with the columns of each row in order, where they are not
    ones : for runs without values: they are arranged as the config wants them once. Values of a
        run would be arranged in each, which takes longer than what most configs save, and was not
        timed when they were tuned: no config that needs it applies
    options : dtype, reduce, heads and target, as :func:`sparsetir.plan` takes them
    """
    if not there_are_records():
        return None
    task = _task(op, pattern.shape, pattern.nnz, feat, **options)

    def made(config: Any) -> Planned | None:
        resorted = not pattern.increases
        matrix: Any = in_order() if resorted else pattern
        if ones:
            matrix = SparseMatrix.from_csr(matrix.indptr, matrix.indices, shape=matrix.shape)
        else:
            config = getattr(config, "unpacked", config)
        found = plan_of(requested(op, matrix, feat, **task.options), config)
        found.chosen_by = "record"
        arranged = found.needs_values and found.arranges_values
        return None if arranged else Planned(found, resorted)

    return by_record(task, made, pattern=lambda: pattern.in_order)


def may_be_recorded(
    op: str, shape: tuple[int, int], nnz: int, feat: int, **options: object
) -> bool:
    """Whether there are records for patterns of about these sizes; options as of `recorded`."""
    return there_are_records() and bool(recorded_configs(_task(op, shape, nnz, feat, **options)))


def _task(op: str, shape: tuple[int, int], nnz: int, feat: int, **options: Any) -> Task:
    return Task(op, cast(Any, Sizes(shape, nnz)), feat, threads=default_threads(), **options)
