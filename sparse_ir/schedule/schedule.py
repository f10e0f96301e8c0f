"""Stage-I schedules: transformations of sparse iterations in coordinate space.

(SparseTIR, section 3.2.2; Senanayake's thesis, chapters 5 to 7.) Decisions about the coordinates
that loops visit, the location of partial results, and which visit writes are made here, before
positions exist. Each primitive returns a valid stage-I function that means the same as before; it
has a file of its own, whose docstring shows a program before and after. Loops are mapped onto the
machine after :meth:`Schedule.lower`, with TVM's own primitives.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

import tvm
from tvm import s_tir

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.lower_sparse_iter import lower_sparse_iter
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.open_axes import refuse_open
from sparsetir.sparse_ir.schedule import (  # noqa: F401, each has its primitives
    aggregate,
    combine_row_pieces,
    cut_space,
    distribute,
    divide,
    facts,
    fuse_steps,
    gallop,
    group_columns_by_pattern,
    locate,
    pack,
    parallelize,
    peel,
    positions,
    precompute,
    ranges,
    reorder,
    segment_accumulate,
    sell_slices,
    sort_rows_by_length,
    split,
    strip_mine_rows,
    tiles,
)
from sparsetir.sparse_ir.schedule.loops import (
    SparseIterationRef,
    SpIter,
    find_iteration,
    handle_of,
    loops_of,
    name_of,
)
from sparsetir.sparse_ir.schedule.primitives import Primitives, arguments_of, wrong_argument
from sparsetir.sparse_ir.schedule.trace import Instruction, Trace
from sparsetir.sparse_ir.verify import verify_once

P = ParamSpec("P")  # a pass's parameters


class Schedule(Primitives):
    """Transform the sparse iterations of a stage-I function; the original is not modified.

    Its methods are the primitives of this package, which
    :func:`sparsetir.sparse_ir.schedule.primitives.primitive` makes of functions, and those below.

    Parameters
    ----------
    func : SparseFunc or IRModule
        A module holds exactly one function. Verified before the first primitive.
    """

    def __init__(self, func: SparseFunc | tvm.IRModule) -> None:
        if isinstance(func, tvm.IRModule):
            functions = [f for f in func.functions.values() if isinstance(f, SparseFunc)]
            if len(functions) != 1:
                raise TypeError(
                    "Schedule: argument 'func': expected a module of one stage-I function, got "
                    f"{len(functions)}"
                )
            func = functions[0]
        if not isinstance(func, SparseFunc):
            raise TypeError(
                "Schedule: argument 'func': expected a stage-I function, got "
                f"{type(func).__name__} (stage II is scheduled with tvm.s_tir.Schedule)"
            )
        refuse_open("Schedule", func)
        self._func = func
        self._verified = False
        self._stage_two: Any = None
        self._lowered: Any = None
        self.trace: Trace = Trace()

    @property
    def func(self) -> SparseFunc:
        """The current function."""
        return self._func

    def get_sparse_iteration(self, name: str) -> SparseIterationRef:
        """The iteration of this name, nested ones included.

        Parameters
        ----------
        name : str
            The name in `T.sp_iter`.

        Returns
        -------
        SparseIterationRef
        """
        if not isinstance(name, str):
            raise ScheduleError(
                f"get_sparse_iteration: argument 'name': expected a string, got {name!r}"
            )
        find_iteration(self._func, name)
        return self._noted("get_sparse_iteration", [name], {}, SparseIterationRef(name))

    def get_sp_iters(self, iteration: SparseIterationRef) -> list[SpIter]:
        """Handles of the iteration's loops, in order.

        Parameters
        ----------
        iteration : SparseIterationRef
            The iteration.

        Returns
        -------
        list of SpIter
        """
        it = find_iteration(self._func, name_of("get_sp_iters", iteration))
        handles = [handle_of(it, loop) for loop in loops_of(it)]
        return self._noted("get_sp_iters", [iteration], {}, handles)

    # -- stage II -----------------------------------------------------------------------------

    @property
    def stage_two(self) -> Any:
        """The `tvm.s_tir.Schedule` that :meth:`lower` continues with; None before."""
        return self._stage_two

    @property
    def lowered(self) -> Any:
        """The stage-II function, as :meth:`lower` first returned it; None before."""
        return self._lowered

    def lower(self) -> Any:
        """Lower to stage II, once; returns a `tvm.s_tir.Schedule` of the lowered function.

        From here on TVM's primitives schedule it; those of stage I are refused.
        """
        if self._stage_two is None:
            self._lowered = lower_sparse_iter(self._func)
            self._continue_with("lower", s_tir.Schedule(s_tir.renew_defs(self._lowered)))
        return self._stage_two

    def rewrite(
        self, change: Callable[Concatenate[Any, P], Any], *arguments: P.args, **options: P.kwargs
    ) -> Any:
        """Apply a pass to the lowered function.

        Parameters
        ----------
        change : callable
            `change(PrimFunc, *arguments, **options)`, which returns a PrimFunc.
        *arguments, **options
            Passed to `change`.

        Returns
        -------
        tvm.s_tir.Schedule
            The schedule of :meth:`lower`, now of the result. Handles of blocks and loops from
            before are no longer valid.
        """
        stage_two = self.lower()
        func = next(iter(stage_two.mod.functions.values()))
        # Keep one object: of two schedules, one would be scheduled and not built.
        stage_two.__move_handle_from__(s_tir.Schedule(change(func, *arguments, **options)))
        return self._continue_with("rewrite", stage_two, change, *arguments, **options)

    # -- internals ----------------------------------------------------------------------------

    def _continue_with(self, primitive: str, stage_two: Any, *inputs: Any, **options: Any) -> Any:
        """Continue with this stage-II schedule, and record the step in the trace."""
        self._stage_two = stage_two
        step = Instruction(primitive, list(inputs), [], options, stage_two=stage_two.trace)
        self.trace.instructions.append(step)
        return stage_two

    def _apply(self, primitive: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """Run a primitive, which returns a function and its output, and record it in the trace."""
        if self._stage_two is not None:
            raise ScheduleError(
                f"{primitive.__name__}: the schedule has gone on to stage II, which TVM's "
                "primitives schedule; expected it before lower()"
            )
        if not self._verified:  # primitives only verify what they change
            verify_once(self._func)
            self._verified = True
        positional, named = arguments_of(primitive, inputs, options)
        wrong = wrong_argument(primitive, positional, named)
        try:
            func, output = primitive(self._func, *positional, **named)
        except ScheduleError:  # its message is more specific
            raise
        except (AttributeError, TypeError, ValueError) as error:  # e.g. an argument of another type
            if wrong:
                raise ScheduleError(wrong) from error
            # TVM's message about a number that does not fit its type.
            beyond = re.search(r"Literal value (\d+) exceeds range of (\w+)", str(error))
            if beyond is None:
                raise
            raise ScheduleError(
                f"{primitive.__name__}: expected sizes that the axis's type, {beyond[2]}, "
                f"holds, got {beyond[1]}; give smaller numbers"
            ) from None
        if wrong:
            raise ScheduleError(wrong)
        self._func = func
        return self._noted(primitive.__name__, positional, named, output)

    def _noted(
        self, primitive: str, inputs: list[Any], options: dict[str, Any], output: Any
    ) -> Any:
        several = isinstance(output, list | tuple)
        outputs = list(output) if several else [] if output is None else [output]
        step = Instruction(primitive, inputs, outputs, options, several)
        self.trace.instructions.append(step)
        return output
