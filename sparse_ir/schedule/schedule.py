"""Stage-I schedules: transformations of sparse iterations in coordinate space.

(SparseTIR, section 3.2.2; Senanayake's thesis, chapters 5 to 7.) What changes which coordinates a
loop visits, where partial results live, or who writes what is done here, before positions exist.
Each primitive gives a valid stage-I function that means the same as the one before; it has a file
of its own, whose docstring shows a program before and after. What maps loops onto the machine is
scheduled after :meth:`Schedule.lower`, with TVM's own primitives.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import s_tir

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.lower_sparse_iter import lower_sparse_iter
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.schedule.annotate import annotate
from sparsetir.sparse_ir.schedule.arguments import listed, wrong_argument
from sparsetir.sparse_ir.schedule.assume import assume
from sparsetir.sparse_ir.schedule.atomic import atomic
from sparsetir.sparse_ir.schedule.bound import bound
from sparsetir.sparse_ir.schedule.distribute import distribute
from sparsetir.sparse_ir.schedule.divide import divide
from sparsetir.sparse_ir.schedule.fuse import sparse_fuse
from sparsetir.sparse_ir.schedule.handles import SparseIterationRef, SpIter
from sparsetir.sparse_ir.schedule.loops import find_iteration, handle_of, loops_of, name_of
from sparsetir.sparse_ir.schedule.meet import meet
from sparsetir.sparse_ir.schedule.pack import pack
from sparsetir.sparse_ir.schedule.parallelize import parallelize
from sparsetir.sparse_ir.schedule.peel import peel
from sparsetir.sparse_ir.schedule.pos import coord, pos
from sparsetir.sparse_ir.schedule.positions import positions
from sparsetir.sparse_ir.schedule.precompute import precompute
from sparsetir.sparse_ir.schedule.reorder import sparse_reorder
from sparsetir.sparse_ir.schedule.row_primitives import RowPrimitives
from sparsetir.sparse_ir.schedule.split import split
from sparsetir.sparse_ir.schedule.tiles import tiles
from sparsetir.sparse_ir.schedule.trace import Instruction, Trace
from sparsetir.sparse_ir.verify import verify

__all__ = ["Schedule"]


class Schedule(RowPrimitives):
    """Transform the sparse iterations of a stage-I function; the function given is not changed.

    Parameters
    ----------
    func : SparseFunc or IRModule
        A module holds just one. Verified before the first primitive.
    """

    def __init__(self, func: SparseFunc | tvm.IRModule) -> None:
        if isinstance(func, tvm.IRModule):
            found = [f for f in func.functions.values() if isinstance(f, SparseFunc)]
            if len(found) != 1:
                raise TypeError(
                    "Schedule: argument 'func': expected a module of one stage-I function, got "
                    f"{len(found)}"
                )
            func = found[0]
        if not isinstance(func, SparseFunc):
            raise TypeError(
                "Schedule: argument 'func': expected a stage-I function, got "
                f"{type(func).__name__} (stage II is scheduled with tvm.s_tir.Schedule)"
            )
        self._func = func
        self._verified = False
        self._stage_two: Any = None
        self._lowered: Any = None
        self.trace: Trace = Trace()

    @property
    def func(self) -> SparseFunc:
        """The function as it is now."""
        return self._func

    def get_sparse_iteration(self, name: str) -> SparseIterationRef:
        """The iteration of that name, nested ones included.

        Parameters
        ----------
        name : str
            As `T.sp_iter` has it.

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
        """Handles of the iteration's loops, in their order.

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

    def sparse_reorder(self, iteration: SparseIterationRef, order: Sequence[SpIter]) -> None:
        """Visit an iteration's axes in another order; an axis stays behind its parent.

        More: `help("sparsetir.sparse_ir.schedule.reorder")`.

        Parameters
        ----------
        iteration : SparseIterationRef
            The iteration.
        order : sequence of SpIter
            All of its loops, outermost first.

        Notes
        -----
        SparseTIR, section 3.2.2.
        """
        self._apply(sparse_reorder, iteration, listed(order))

    def sparse_fuse(self, iteration: SparseIterationRef, axes: Sequence[SpIter]) -> SpIter:
        """Iterate neighbouring axes as one loop over their joint positions.

        More: `help("sparsetir.sparse_ir.schedule.fuse")`.

        Parameters
        ----------
        iteration : SparseIterationRef
            The iteration.
        axes : sequence of SpIter
            Neighbours, each over a dense_fixed axis or behind its parent.

        Returns
        -------
        SpIter
            The loop.

        Notes
        -----
        SparseTIR, section 3.2.2.
        """
        return self._apply(sparse_fuse, iteration, listed(axes))

    def split(
        self, loop: SpIter, factors: Sequence[int | None], *, tail: str = "guard"
    ) -> list[SpIter]:
        """Cut a loop into tiles.

        More: `help("sparsetir.sparse_ir.schedule.split")`, and `split_positions` beside it.

        Parameters
        ----------
        loop : SpIter
            Over a dense axis, which is cut by coordinates, or over what is stored, by positions.
        factors : sequence of int or None
            An extent for each loop made; None as the first is as many as it takes.
        tail : {"guard", "shift", "repeat", "exact"}
            What becomes of coordinates beyond the axis: "guard" leaves them out, with conditions;
            "shift" lets the last tile begin earlier; "repeat" visits the last coordinate again;
            "exact" promises that there are none. By positions "guard" alone.

        Returns
        -------
        list of SpIter
            The loops made, outermost first. A loop of fused rows and columns gives three: chunks,
            pieces of rows, elements of a piece.
        """
        return self._apply(split, loop, listed(factors), tail=tail)

    def pos(self, loop: SpIter) -> None:
        """Let later cuts of a loop cut positions.

        More: `help("sparsetir.sparse_ir.schedule.pos")`.

        Parameters
        ----------
        loop : SpIter
            The loop.
        """
        self._apply(pos, loop)

    def coord(self, loop: SpIter) -> None:
        """Let later cuts of a loop cut coordinates.

        More: `help("sparsetir.sparse_ir.schedule.pos")`.

        Parameters
        ----------
        loop : SpIter
            The loop.
        """
        self._apply(coord, loop)

    def divide(
        self, loop: SpIter, parts: int | str, *, by: str | None = None, cost: int = 2,
        default: int = 16, ahead: str | None = None,
    ) -> list[SpIter]:  # fmt: skip
        """Cut a loop where the structure says.

        More: `help("sparsetir.sparse_ir.schedule.divide")`.

        Parameters
        ----------
        loop : SpIter
            The loop.
        parts : int or str
            How many, or a name, by which the number can be chosen without compiling again.
        by : {"positions", "work", "coordinates"}, optional
            "positions" (the default), equally many in each; "work", equally many elements under
            them; "coordinates", ranges of what a sparse axis stores.
        cost : int
            Of a coordinate, in elements, for "work".
        default : int
            How many there are by a name until somebody says another number.
        ahead : str, optional
            For "work", a name, by which the first part can be given more than the others.

        Returns
        -------
        list of SpIter
            The loop over the parts, and that over what is in one.
        """
        return self._apply(divide, loop, parts, by=by, cost=cost, default=default, ahead=ahead)

    def positions(
        self, loop: SpIter, *, parts: int | str | None = None,
        default: int | dict[str, Any] = 16, rows: str = "table",
    ) -> SpIter:  # fmt: skip
        """Go through the elements of fused axes by position.

        More: `help("sparsetir.sparse_ir.schedule.positions")`.

        Parameters
        ----------
        loop : SpIter
            Over a dense axis fused with the sparse one under it.
        parts : int or str, optional
            Ranges of columns to go through one after the other, as `divide` takes them; None for
            the order of storage.
        default : int or dict
            How many there are by a name until somebody says another number.
        rows : {"table", "search", "blocks"}
            Where kernels find the row of an element: "table", of each; "search", where a thread
            begins, and carried from there; "blocks", the same between the rows of two blocks.

        Returns
        -------
        SpIter
            The loop.
        """
        return self._apply(positions, loop, parts=parts, default=default, rows=rows)

    def pack(self, buffer: str, iteration: SparseIterationRef) -> str:
        """Bring values into the order in which an iteration reads them.

        A plan does it once, a kernel in every call. More:
        `help("sparsetir.sparse_ir.schedule.pack")`.

        Parameters
        ----------
        buffer : str
            Name of what the iteration reads at an array of positions, as after `slices`.
        iteration : SparseIterationRef
            The iteration.

        Returns
        -------
        str
            Name of the buffer with the values in that order.
        """
        return self._apply(pack, buffer, iteration)

    def peel(self, loop: SpIter, multiple: int) -> tuple[SpIter, SpIter]:
        """Part the coordinates that fill no whole tile off, as an iteration of their own.

        More: `help("sparsetir.sparse_ir.schedule.peel")`.

        Parameters
        ----------
        loop : SpIter
            Over a dense axis.
        multiple : int
            What the length that is left is a multiple of.

        Returns
        -------
        (SpIter, SpIter)
            The loop over the others, and that of the iteration made.
        """
        return self._apply(peel, loop, multiple)

    def distribute(self, loop: SpIter | Sequence[SpIter]) -> list[SparseIterationRef]:
        """Move the innermost loops of an iteration into each of its steps.

        More: `help("sparsetir.sparse_ir.schedule.distribute")`.

        Parameters
        ----------
        loop : SpIter or sequence of SpIter
            The loops.

        Returns
        -------
        list of SparseIterationRef
            The steps.
        """
        return self._apply(distribute, loop if isinstance(loop, SpIter) else listed(loop))

    def parallelize(
        self, loop: SpIter | Sequence[SpIter], unit: str = "cpu", *, race: str = "none",
        per_block: int | None = None,
    ) -> list[SparseIterationRef] | None:  # fmt: skip
        """Divide a loop, or neighbouring ones as one, among workers; the last thing done to it.

        More: `help("sparsetir.sparse_ir.schedule.parallelize")`, and `gpu_races` beside it.

        Parameters
        ----------
        loop : SpIter or sequence of SpIter
            The loop.
        unit : {"cpu", "block", "warp", "thread", "vector"}
            "cpu", the threads of a CPU; "block", "warp" or "thread" of a GPU.
        race : str
            "none", refused where visits may meet; "ignore", on your word that they do not;
            "temporary", on a CPU of chunks of rows and elements fused: those of rows of others are
            kept, and added afterwards; of threads of a GPU: one writes what all have. Of a GPU also
            "atomics", "group(r)" and "segment(r)", where r threads add up what they have for one
            row, or for each run of equal rows.
        per_block : int, optional
            Visits of a GPU's block of threads, where the loop is over blocks, too.

        Returns
        -------
        list of SparseIterationRef or None
            What writes, for "atomics", "group(r)" and "segment(r)".
        """
        handles = loop if isinstance(loop, SpIter) else listed(loop)
        given = {} if per_block is None else {"per_block": per_block}
        return self._apply(parallelize, handles, unit, race=race, **given)

    def bound(self, loop: SpIter, n: int, kind: str) -> None:
        """Promise something about the extent of a loop, which kernels check in every call.

        More: `help("sparsetir.sparse_ir.schedule.bound")`.

        Parameters
        ----------
        loop : SpIter
            The loop.
        n : int
            What the extent is compared with.
        kind : {"exact", "max", "min", "multiple"}
            The extent is n, at most n, at least n, or a multiple of n.
        """
        self._apply(bound, loop, n, kind)

    def assume(self, fact: str, *, axis: str, buffer: str | None = None) -> None:
        """Say what the program does not: the word of whoever schedules it.

        More: `help("sparsetir.sparse_ir.schedule.assume")`.

        Parameters
        ----------
        fact : {"coordinates", "filled"}
            "coordinates": `buffer` holds coordinates of `axis`; "filled": no slot of `axis` is
            padding.
        axis : str
            Name of the axis.
        buffer : str, optional
            Name of the buffer.
        """
        self._apply(assume, fact, axis=axis, buffer=buffer)

    def precompute(
        self,
        buffer: str,
        at: SpIter | SparseIterationRef,
        axes: Sequence[SpIter | str],
        *,
        lanes: Sequence[SpIter] = (),
        scope: str = "local",
        dtype: str | None = None,
        hoist: bool = False,
        name: str | None = None,
    ) -> list[SparseIterationRef]:
        """Let a result, or a tile of an operand, go through a workspace.

        More: `help("sparsetir.sparse_ir.schedule.precompute")`.

        Parameters
        ----------
        buffer : str
            Name of what the iteration writes (a result) or only reads (an operand).
        at : SpIter or SparseIterationRef
            The innermost of the loops whose visits have a workspace each; the iteration for one.
        axes : sequence of SpIter or str
            What the workspace is over. Of a result all spatial loops inside `at`; of an operand
            such loops, by their handles, and its own axes as a whole, by their names.
        lanes : sequence of SpIter
            Reduction loops inside `at` that keep sums of their own, added up at the end.
        scope : {"local", "shared", "global"}
            "local" is registers, of constant extents.
        dtype : str, optional
            Of the workspace, where it is not that of the buffer.
        hoist : bool
            Multiply factors that stand still during a visit once, at its end.
        name : str, optional
            Of the workspace.

        Returns
        -------
        list of SparseIterationRef
            Of a reduction start, reduce, (with lanes) sums and write; of another result value and
            write; of an operand the copy.
        """
        return self._apply(
            precompute, buffer, at, listed(axes),
            lanes=listed(lanes), scope=scope, dtype=dtype, hoist=hoist, name=name,
        )  # fmt: skip

    def tiles(
        self, buffer: str, iteration: SparseIterationRef, sizes: dict[str, Any], *,
        order: list[str], given: bool = False,
    ) -> SparseIterationRef | None:  # fmt: skip
        """Bring a dense operand into tiles of constant extents.

        More: `help("sparsetir.sparse_ir.schedule.tiles")`.

        Parameters
        ----------
        buffer : str
            Name of the operand.
        iteration : SparseIterationRef
            What reads it.
        sizes : dict of str to sequence of int
            Extents that each axis of the operand is cut into.
        order : list of str
            The axes of the tiles, outermost first: "K0" is the first of the operand's axis K.
        given : bool
            The parameter takes the tiles in place of the operand.

        Returns
        -------
        SparseIterationRef or None
            What copies the operand; None where it is given.
        """
        return self._apply(tiles, buffer, iteration, sizes, order=order, given=given)

    def meet(
        self, iterations: Sequence[SparseIterationRef], *, race: str
    ) -> list[SparseIterationRef]:
        """Say how pieces of a row meet that iterations add to.

        More: `help("sparsetir.sparse_ir.schedule.meet")`.

        Parameters
        ----------
        iterations : sequence of SparseIterationRef
            All that add to a result.
        race : {"atomics", "ignore"}
            "atomics": rows of several pieces are added to so; "ignore": on your word there are no
            such rows.

        Returns
        -------
        list of SparseIterationRef
            What adds atomically.
        """
        return self._apply(meet, listed(iterations), race=race)

    def atomic(self, iteration: SparseIterationRef) -> None:
        """Let an iteration update its result atomically, on a GPU, whatever visits it.

        More: `help("sparsetir.sparse_ir.schedule.atomic")`.

        Parameters
        ----------
        iteration : SparseIterationRef
            Of a sum, maximum or minimum, without an init.
        """
        self._apply(atomic, iteration)

    def annotate(self, iteration: SparseIterationRef, key: str, value: Any) -> None:
        """Set an annotation of the iteration; it rides on the blocks of stage II.

        Parameters
        ----------
        iteration : SparseIterationRef
            The iteration.
        key : str
            Of the annotation.
        value
            Of the annotation.
        """
        self._apply(annotate, iteration, key, value)

    # -- stage II -----------------------------------------------------------------------------

    @property
    def stage_two(self) -> Any:
        """The `tvm.s_tir.Schedule` that :meth:`lower` went on to; None before."""
        return self._stage_two

    @property
    def lowered(self) -> Any:
        """The stage-II function that :meth:`lower` made, as it was then; None before."""
        return self._lowered

    def lower(self) -> Any:
        """Go on to stage II, once: a `tvm.s_tir.Schedule` of the lowered function.

        From here on TVM's primitives schedule it; those of stage I are refused.
        """
        if self._stage_two is None:
            self._lowered = lower_sparse_iter(self._func)
            self._go_on("lower", s_tir.Schedule(s_tir.renew_defs(self._lowered)))
        return self._stage_two

    def rewrite(self, change: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Apply a pass to the lowered function.

        Parameters
        ----------
        change : callable
            `change(PrimFunc, *arguments, **options)`, which gives a PrimFunc.
        *arguments, **options
            For `change`.

        Returns
        -------
        tvm.s_tir.Schedule
            That of :meth:`lower`, now of the result. Handles of blocks and loops that it gave
            before are not known to it any more.
        """
        stage_two = self.lower()
        func = next(iter(stage_two.mod.functions.values()))
        # The same object from here on: of two, one would be scheduled and not built.
        stage_two.__move_handle_from__(s_tir.Schedule(change(func, *arguments, **options)))
        return self._go_on("rewrite", stage_two, change, *arguments, **options)

    # -- internals ----------------------------------------------------------------------------

    def _go_on(self, primitive: str, stage_two: Any, *inputs: Any, **options: Any) -> Any:
        """Schedule this from now on, and note it in the trace."""
        self._stage_two = stage_two
        step = Instruction(primitive, list(inputs), [], options, stage_two=stage_two.trace)
        self.trace.instructions.append(step)
        return stage_two

    def _apply(self, primitive: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """Run a primitive, which gives a function and handles, and note it in the trace."""
        if self._stage_two is not None:
            raise ScheduleError(
                f"{primitive.__name__}: the schedule has gone on to stage II, which TVM's "
                "primitives schedule; expected it before lower()"
            )
        if not self._verified:  # primitives look at what they change
            verify(self._func)
            self._verified = True
        wrong = wrong_argument(primitive, inputs, options)
        try:
            func, output = primitive(self._func, *inputs, **options)
        except ScheduleError:  # which says more
            raise
        except (AttributeError, TypeError, ValueError) as error:  # as an argument of another type
            if wrong:
                raise ScheduleError(wrong) from error
            # What TVM says of a number that its type does not hold.
            beyond = re.search(r"Literal value (\d+) exceeds range of (\w+)", str(error))
            if beyond is None:
                raise
            raise ScheduleError(
                f"{primitive.__name__}: expected sizes that the axis's type, {beyond[2]}, "
                f"holds, got {beyond[1]}; give smaller numbers"
            ) from None
        if wrong:
            raise ScheduleError(wrong)
        # What a primitive does by itself is not said, so that traces stay short.
        given = inspect.signature(primitive).parameters
        default = {n: [] if p.default == () else p.default for n, p in given.items()}
        options = {n: v for n, v in options.items() if v != default[n]}
        self._func = func
        return self._noted(primitive.__name__, list(inputs), options, output)

    def _noted(
        self, primitive: str, inputs: list[Any], options: dict[str, Any], output: Any
    ) -> Any:
        several = isinstance(output, list | tuple)
        outputs = list(output) if several else [] if output is None else [output]
        step = Instruction(primitive, inputs, outputs, options, several)
        self.trace.instructions.append(step)
        return output
