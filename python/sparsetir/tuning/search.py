"""The function `tune`: searches of formats and schedules for operators, programs and models."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import tvm

from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.extras import need
from sparsetir.formats.format import REGISTRY
from sparsetir.planning.request import Request
from sparsetir.records.record import Key, Record
from sparsetir.records.records import RecordError, Records
from sparsetir.records.task import Config
from sparsetir.runtime.file_errors import as_path
from sparsetir.runtime.refusals import wrong
from sparsetir.schedules.search.configs import from_data, to_data
from sparsetir.schedules.search.spaces import Space
from sparsetir.schedules.targets import TargetLike, is_gpu, resolve_target
from sparsetir.schedules.templates.registry import TEMPLATES, templates_for
from sparsetir.sparse_ir.errors import describe
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.origins import ORIGINS
from sparsetir.tuning.measure import START_LIMIT, Device, Measurer, cores_for
from sparsetir.tuning.program import ProgramTask
from sparsetir.tuning.schedule_ref import importing, module_ref
from sparsetir.tuning.sought import check_numbers, operator_search, program_search, refuse_options
from sparsetir.tuning.tuned import Search, Tuned, TunedPlan, TunedProgram, TunedSparse

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sparsetir.tuning.run import Run


SAMPLERS = ("auto", "tpe", "random", "exhaustive")
NEIGHBOURS = 3


class SearchOptions(TypedDict, total=False):
    """Keyword arguments of :func:`tune` for all tasks."""

    target: TargetLike
    threads: int | None
    trials: int
    seconds: float | None
    sampler: str
    seed: int
    workers: int
    records: Path | str | None
    storage: str | None
    time_limit: float
    memory_limit: int | None
    transfer: bool
    progress: Any
    graph: str


class OperatorOptions(SearchOptions, total=False):
    """Keyword arguments for an operator."""

    dtype: str | None
    reduce: str
    heads: int | None
    feat_in: int | None
    weighted: bool
    edge_feat: int | None
    scale: float | None
    semiring: str
    mask: object
    remote: Device | None
    modules: Sequence[str]


class ProgramOptions(SearchOptions, total=False):
    """Keyword arguments for a function."""

    schedule: Callable[..., object] | None
    space: Mapping[str, Sequence[object]] | None


@overload
def tune(
    op: Literal["spmm", "spmv", "sddmm", "u_dot_v"],
    matrix: object,
    feat: object = None,
    **options: Unpack[OperatorOptions],
) -> Tuned: ...
@overload
def tune(
    op: Literal["rgms", "softmax", "sparse_softmax", "edge_softmax", "attention"],
    matrix: object,
    feat: object = None,
    **options: Unpack[OperatorOptions],
) -> TunedPlan: ...
@overload
def tune(
    op: Literal["spgemm"], matrix: object, feat: object, **options: Unpack[OperatorOptions]
) -> TunedSparse: ...
@overload
def tune(
    op: str, matrix: object, feat: SparseMatrix, *more: object, **options: Unpack[OperatorOptions]
) -> TunedSparse: ...
@overload
def tune(
    op: str, matrix: object, feat: object = None, **options: Unpack[OperatorOptions]
) -> Tuned | TunedPlan: ...
@overload
def tune(
    op: SparseFunc, matrix: Mapping[str, object], **options: Unpack[ProgramOptions]
) -> TunedProgram: ...
@overload
def tune(
    op: Any, matrix: object, feat: object = None, *more: object, **options: Unpack[SearchOptions]
) -> Any: ...
def tune(
    op: Any,
    matrix: object,
    feat: object = None,
    *more: object,
    schedule: Callable[..., object] | None = None,
    space: Mapping[str, Sequence[object]] | None = None,
    dtype: str | None = None,
    reduce: str = "sum",
    heads: int | None = None,
    target: TargetLike = "llvm",
    threads: int | None = None,
    feat_in: int | None = None,
    weighted: bool = True,
    edge_feat: int | None = None,
    scale: float | None = None,
    semiring: str = "plus_times",
    mask: object = None,
    trials: int = 64,
    seconds: float | None = None,
    sampler: str = "auto",
    seed: int = 0,
    workers: int = 1,
    records: Path | str | None = None,
    storage: str | None = None,
    time_limit: float = 60.0,
    memory_limit: int | None = None,
    transfer: bool = True,
    progress: Any = None,
    graph: str = "",
    remote: Device | None = None,
    modules: Sequence[str] = (),
) -> Any:
    """Search formats and schedules for an operator on a matrix, or schedules for a function.

    `tune("spmm", matrix, 64)` returns a :class:`Tuned`; for your own function, `tune(function,
    {"a": array, "indptr": ...}, schedule=apply, space={"tile": [1, 2]})` returns a
    :class:`TunedProgram`. `tune("rgms", tensor, 64, feat_in=32)`, on a CPU, and messages, softmax
    and attention return a :class:`sparsetir.tuning.tuned.TunedPlan`, with its `plan()`; products
    and sums of sparse matrices, such as `tune("spgemm", A, B)`, a
    :class:`sparsetir.tuning.tuned.TunedSparse`. `tune(model, *inputs)` searches each region that
    takes at least 2 % of a model's time: a :class:`sparsetir.graph.tune_model.TunedModel`.

    Parameters
    ----------
    op : str, SparseFunc or torch.nn.Module
        An operator's name, as for :func:`sparsetir.plan`, a stage-I function, an expression, or a
        model, followed by its arguments.
    matrix : SparseMatrix, anything it can be made from, or dict
        The operator's matrix; for a function its arguments by name, arrays and sizes, for an
        expression its operands. Sizes that shapes imply may be omitted. Arrays are not changed.
    feat, dtype, reduce, heads, target, threads
        The same as for :func:`sparsetir.plan`; a function takes target and threads: those that
        measurements run on. Its kernel runs on those of the process that calls it.
    *more : sparse matrices
        The same as for :func:`sparsetir.plan`.
    schedule : callable, optional
        For a function: `schedule(sch, config)` at the top level of a file, called in other
        processes, which import it; config is a dict with a choice from each entry of the space. By
        default :mod:`sparsetir.schedules.search.program_space` derives one from the function.
    space : mapping of str to sequence, optional
        For a function: choices by name, numbers, texts, booleans or None; without a schedule, they
        replace some of the derived choices.
    feat_in, weighted, edge_feat, scale, semiring, mask
        The same as for :func:`sparsetir.plan`.
    trials : int
        Number of configs to measure in all, including those of earlier runs of the same search and
        of other processes. No config is measured twice by one process.
    seconds : float, optional
        Time limit of the search.
    sampler : {"auto", "tpe", "random", "exhaustive"}
        "exhaustive": all configs, regardless of `trials`; "auto": exhaustive if there are no more
        configs than trials, else tpe.
    seed : int
        With one worker and equal measurements, the same seed gives the same trials.
    workers : int
        Number of parallel measurements: on a CPU each on its own cores, else each on its own GPU.
    records : str or Path, optional
        The file for results, with trials in another one beside it, "" for none; see
        :func:`sparsetir.records.records.default_path` for the default.
    storage : str, optional
        URL of a database for the trials in place of the file, in Optuna's form, such as
        "postgresql+psycopg://user@host/name" (`pip install 'sparsetir[postgresql]'`): all machines
        that tune the same task through it share the work.
    time_limit, memory_limit
        Seconds and bytes of a config, see :class:`sparsetir.tuning.measure.Measurer`.
    transfer : bool
        Start with the best configs for similar matrices, or for a function with other arguments.
    progress : optional
        An object with `begin(total, done)`, `step(trial, best, failures, default_seconds)` and
        `end()` (:class:`sparsetir.tuning.progress.Bar`); None for silence.
    graph : str
        A display name of the matrix, or of the arguments.
    remote : Remote, optional
        A remote device; for operators.
    modules : sequence of str
        Names of plug-ins, modules that register operators, formats or templates, to import first.
        Modules that are imported already need not be listed.

    Returns
    -------
    Tuned, TunedProgram, TunedPlan, TunedSparse or TunedModel

    Raises
    ------
    ValueError, TypeError
        For invalid arguments.
    ImportError
        Without Optuna.
    sparsetir.records.records.RecordError
        For a file without records.
    RuntimeError
        If nothing can be measured.

    Notes
    -----
    The default config comes first. A config that crashes, hangs, runs out of memory or computes
    wrong results is a failed trial; if all but the default fail, there is a RuntimeWarning with the
    first reason. A function's results are compared with the interpreter's if the
    arguments are small, else with those of the default schedule's kernel. Ctrl-C ends the search;
    the results so far are returned and recorded. (SparseTIR, section 2.)
    """
    if importing():
        raise RuntimeError(
            "tune: called while a file is imported for its definitions; put the call under "
            "if __name__ == '__main__'"
        )
    check_numbers(
        trials, seed, workers, memory_limit, {"seconds": seconds, "time_limit": time_limit}
    )
    if sampler not in SAMPLERS:
        raise wrong("tune", "sampler", f"one of {', '.join(SAMPLERS)}", f"{sampler!r}")
    if isinstance(modules, str) or not all(isinstance(name, str) for name in modules):
        raise wrong("tune", "modules", "a list of names", f"{modules!r}", TypeError)
    if not isinstance(remote, Device | None):
        raise wrong("tune", "remote", "a Remote", f"{remote!r}", TypeError)
    if not isinstance(graph, str):
        raise wrong("tune", "graph", "a text", f"{graph!r}", TypeError)
    make_run = _run_class()
    for name in modules:
        import_module(name)
    specific: dict[str, object] = {
        "dtype": dtype, "reduce": reduce, "heads": heads, "feat_in": feat_in, "weighted": weighted,
        "edge_feat": edge_feat, "scale": scale, "semiring": semiring, "mask": mask,
    }  # fmt: skip
    on = {"target": target, "threads": threads}
    plugged_in = {"remote": remote, "modules": modules or None}
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(op, torch.nn.Module):
        elsewhere = {"target": None if target == "llvm" else target, **plugged_in}
        refuse_options("a model", {"schedule": schedule, "space": space, **specific, **elsewhere})
        inputs = [matrix, *([feat] if feat is not None or more else []), *more]
        # It searches each region, and belongs to a higher package.
        return import_module("sparsetir.graph.tune_model").tune_model(
            op, inputs, threads=threads, trials=trials, seconds=seconds, sampler=sampler, seed=seed,
            workers=workers, records=records, storage=storage, time_limit=time_limit,
            memory_limit=memory_limit, transfer=transfer, progress=progress, graph=graph,
        )  # fmt: skip
    if isinstance(op, str) and ("=" in op or "->" in op):
        if not isinstance(matrix, Mapping):
            expected = "a dict of the expression's operands"
            raise wrong("tune", "matrix", expected, describe(matrix), TypeError)
        # Expressions belong to a higher package.
        program = import_module("sparsetir.expressions.einsum").einsum_program
        op, matrix = program(op, matrix, caller="tune", at_pattern=True)
    if isinstance(op, str):
        refuse_options(f"'{op}'", {"schedule": schedule, "space": space})
        device = None if remote is None else remote.key
        tuned, candidates, first = operator_search(
            op, matrix, feat, *more, device=device, **on, **specific
        )
        if type(tuned) is not Tuned:
            refuse_options(f"'{op}'", plugged_in)
    else:
        refuse_options("a function", {"feat": feat, "more": more or None, **specific, **plugged_in})
        tuned, candidates, first = program_search(op, matrix, schedule, space, **on)
    kept = _records(records)
    if transfer and kept is not None:
        # The default stays first.
        first[1:1] = _from_neighbours(kept, tuned, candidates)
    every = candidates.points()
    tuned.configs = len(every)
    # Configs of plug-in templates are tried early.
    first[1:1] = [c for _, c in every if _is_plugged_in(c)]
    if sampler == "auto":
        sampler = "exhaustive" if len(every) <= trials else "tpe"
    limit = None if sampler == "exhaustive" else trials
    trials_in = _trials_file(kept) if storage is None else storage
    options = {"time_limit": time_limit, "memory_limit": memory_limit, "remote": remote}
    options["modules"] = tuple(dict.fromkeys([*modules, *_plug_ins(tuned.task)]))
    task, places = tuned.task, _places(workers, tuned.task)
    with ExitStack() as stack:
        measurers = [stack.enter_context(Measurer(task, **options, **place)) for place in places]
        run = stack.enter_context(make_run(
            study_name(tuned.key), trials_in, candidates, sampler=sampler, seed=int(seed),
            first=first, trials=limit, seconds=seconds, patience=2 * time_limit + START_LIMIT,
            progress=progress,
        ))  # fmt: skip
        if progress is not None:
            total = len(every) if limit is None else min(len(every), limit)
            progress.begin(total, len(run.trials()))
            stack.callback(progress.end)
        try:
            run.search(measurers)
            tuned.finals = run.finals(measurers[0])
        except KeyboardInterrupt:
            tuned.interrupted = True
        tuned.trials = run.trials()
        tuned.importances = run.importances()
    tuned.warnings += run.warnings
    _warn_of_failures(tuned)
    if kept is not None:
        _keep(kept, tuned, graph)
    return tuned


def _plug_ins(task: Request | ProgramTask) -> list[str]:
    """The users' modules that register an operator's formats and templates, for the workers."""
    if isinstance(task, ProgramTask) or task.operator.on != "matrix":
        return []
    templates = templates_for(task.problem, task.gpu)
    kinds = [*(t.config for t in templates), *(entry.kind for entry in REGISTRY.values())]
    names = {task.name: task.name, **{kind: kind.__name__ for kind in kinds}}
    return [module_ref(name, ORIGINS[x]) for x, name in names.items() if x in ORIGINS]


def _is_plugged_in(config: Config) -> bool:
    return any(t.configs for t in TEMPLATES.values() if t.config is type(config))


def _run_class() -> type[Run]:
    """The class `Run`, imported late, as it needs Optuna, which is optional and slow to import."""
    need("tune", "optuna", "tune", title="Optuna")
    need("tune", "psutil", "tune")
    from sparsetir.tuning.run import Run

    return Run


def _records(path: Path | str | None) -> Records | None:
    """The file of records, or None if there should be none."""
    if path == "":
        return None
    store = Records(None if path is None else as_path("tune", "records", path))
    if store.path is None:
        return None
    if store.path.is_dir():
        raise ValueError(f"tune: argument 'records': expected a file, got the folder {store.path}")
    return store


def study_name(key: Key) -> str:
    """The name of the study of a key, with versions, as other versions have other kernels."""
    return f"{key.text()}-{metadata.version('sparsetir')}-tvm{metadata.version('apache-tvm')}"


def forget_trials(records: Records, key: Key) -> None:
    """Delete the trials of a key, which a search would otherwise continue.

    Raises ImportError without Optuna.
    """
    file = _trials_file(records)
    if file is not None and file.exists():
        _run_class()
        from sparsetir.tuning.trial_store import forget

        forget(study_name(key), file)


def _trials_file(records: Records | None) -> Path | None:
    """The file of trials, beside the records."""
    if records is None or records.path is None:
        return None
    return records.path.with_name(f"{records.path.stem}-trials.sqlite")


def _from_neighbours(records: Records, tuned: Search, space: Space) -> list[Config]:
    """The best configs for similar data that are in this space."""
    configs = []
    for record in records.neighbours(tuned.key, tuned.task.traits(), NEIGHBOURS):
        try:
            config = from_data(record.config)
        except ValueError as error:  # of another version
            tuned.warnings.append(f"record {record.id} is left out: {error}")
            continue
        if space.point(config) is not None:
            configs.append(config)
    return configs


def _places(workers: int, task: Request | ProgramTask) -> list[dict[str, Any]]:
    """The options of each measurer that place it on its own cores, or its own GPU."""
    target = resolve_target(task.target)
    if workers == 1:
        return [{}]
    if not is_gpu(target):
        return [{"cores": cores} for cores in cores_for(workers, task.threads)]
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        devices = [name for name in named.split(",") if name]
    else:
        kind = target.kind.name
        devices = [str(i) for i in range(workers) if tvm.runtime.device(kind, i).exist]
    if len(devices) < workers:
        raise wrong("tune", "workers", "at most one for each GPU", f"{workers} for {len(devices)}")
    return [{"environment": {"CUDA_VISIBLE_DEVICES": name}} for name in devices[:workers]]


def _warn_of_failures(tuned: Search) -> None:
    """Warn if all configs but the default failed: the default is then best for lack of others."""
    others = {t.number for t in tuned.trials if t.config != tuned.default}
    ran = tuned.default_seconds is not None
    if ran and others and others <= {t.number for t in tuned.failures}:
        told = f"all configs besides the default failed ({len(others)})"
        tuned.warnings.append(f"{told}; the first failure: {tuned.first_failure}")
        warnings.warn(f"tune: {tuned.warnings[-1]}", RuntimeWarning, stacklevel=3)


def _keep(records: Records, tuned: Search, graph: str) -> None:
    """Add a record of the best config, if any ran."""
    try:
        best = tuned.best
    except RuntimeError:
        return
    outcome = best.outcome
    assert outcome.seconds is not None
    record = Record(
        tuned.key, to_data(best.config), outcome.seconds, tuned.default_seconds,
        outcome.compile_seconds, outcome.convert_seconds, outcome.padding, outcome.bytes,
        statistics=tuned.task.traits(), trials=len(tuned.trials), graph=graph,
    )  # fmt: skip
    try:
        records.add(record)
    except RecordError as error:
        tuned.warnings.append(f"the result is not recorded: {error}")
