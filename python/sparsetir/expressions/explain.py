"""The function `sparsetir.explain`, for programs, expressions and models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, overload

from sparsetir.expressions.einsum import einsum_program
from sparsetir.planning.run_plan import Plan
from sparsetir.runtime.explained import ProgramExplanation, explain_program
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.refusals import wrong
from sparsetir.schedules.targets import TargetLike
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.schedule import Schedule

OPTIONS = ("schedule", "target")  # for programs and expressions
OF_EXPRESSIONS = ("reduce", "semiring", "like", "format", "formats", "optimize")


@overload
def explain(
    what: SparseFunc | Schedule | Kernel | Plan,
    arguments: Mapping[str, object] | None = None,
    *,
    schedule: Callable[..., object] | None = None,
    target: TargetLike | None = None,
) -> ProgramExplanation: ...
@overload
def explain(
    what: str,
    *operands: object,
    schedule: Callable[..., object] | None = None,
    target: TargetLike | None = None,
    **by_name: object,
) -> ProgramExplanation: ...
@overload
def explain(what: Any, *inputs: Any, **options: Any) -> Any: ...
def explain(what: Any, *inputs: Any, **options: Any) -> Any:
    """Show what the compiler did with a program, an expression or a model.

    `explain(program, {"feat": 64, "a": array, ...})` shows for each loop whether it may run in
    parallel, with the accesses that prove or prevent it; the chosen schedule; and how close the
    kernel is to the machine's limits. `sparsetir explain` on the command line shows the same.
    `explain(model, *inputs)` shows how `torch.compile(model, backend="sparsetir")` compiles a
    model, and how long each part takes.

    Parameters
    ----------
    what : SparseFunc, Schedule, Kernel, Plan, str, torch.nn.Module or function
        A program as a stage-I function, scheduled or not, or a kernel, or a plan, for its kernel;
        an expression, as for :func:`einsum`; or a model, or a function of torch tensors.
    *inputs : dict, operands or arguments
        For a program its arguments by name, or none. Sizes that shapes imply may be omitted;
        missing arrays of floating-point numbers are random, and missing outputs zeros. On a CPU the
        kernel is then run and timed, which takes a second or two; arrays are not changed. For an
        expression the operands, as for :func:`einsum`. For a model its arguments.
    **options
        For a program, unless it is built, and for an expression: `schedule`, a function (sch), by
        default the default schedule, and `target`, as for :func:`build`. For an expression also
        operands by name, and `reduce`, `semiring`, `like`, `format`, `formats` and `optimize`, as
        for :func:`einsum`; a sparse result is computed at its pattern, which is found first. For a
        model its arguments by name.

    Returns
    -------
    ProgramExplanation or Explanation
        Print it. For a program, its `facts` hold the same as data. For a model, see
        :func:`sparsetir.graph.explain.explain`.

    Raises
    ------
    ValueError, TypeError
        For an invalid argument, which the message names.
    Exception
        Any exception of a model for its inputs.

    Examples
    --------
    >>> import sparsetir
    >>> program = sparsetir.expression("y[i] = A[i, j] * x[j]", A="csr")
    >>> for loop in sparsetir.explain(program).facts["loops"]:
    ...     print(loop["loop"], loop["parallel"], "-", loop["why"])
    i yes - visits that differ in i access other elements: y[i]
    j no - a reduction: visits that differ in j update the same y[i]
    """
    if isinstance(what, Plan):
        what = what.kernel
    if isinstance(what, SparseFunc | Schedule | Kernel):
        _refuse_options(options)
        if len(inputs) > 1:
            raise wrong("explain", "inputs", "one dict of arguments", f"{len(inputs)} inputs")
        return explain_program(what, *inputs, **options)
    if isinstance(what, str):
        program_options, more = (
            {name: options.pop(name) for name in names if name in options}
            for names in (OPTIONS, OF_EXPRESSIONS)
        )
        if "=" not in what and "->" not in what:
            expected = "an expression, such as 'C[i, k] = A[i, j] * X[j, k]'"
            raise wrong("explain", "what", expected, f"{what!r}")
        program, arguments = einsum_program(
            what, options, inputs, caller="explain", at_pattern=True, **more
        )
        return explain_program(program, arguments, name=what, **program_options)
    if not callable(what):
        expected = "a stage-I function, a Schedule, a Kernel, a plan, an expression or a model"
        raise wrong("explain", "what", expected, type(what).__name__, TypeError)
    # Models belong to a higher package, and need torch.
    return import_module("sparsetir.graph.explain").explain(what, *inputs, **options)


def _refuse_options(options: Mapping[str, object]) -> None:
    """Raise TypeError for unknown options of programs, whose arguments come in a dict."""
    for name in options:
        if name not in OPTIONS:
            expected = f"one of {', '.join(OPTIONS)}; arguments of a program come in one dict"
            raise wrong("explain", name, expected, "another name", TypeError)
