"""The circumstances of measurements; tables and JSON files."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from sparsetir.runtime.file_errors import write_whole

ROOT = Path(__file__).resolve().parents[1]
# Variables that set a library's number of threads and how they wait; unset ones have its default.
OF_THREADS = ("OMP_", "GOMP_", "KMP_", "MKL_", "TVM_", "OPENBLAS_", "SPARSETIR_POOL")
PACKAGES = ("apache-tvm", "apache-tvm-ffi", "numpy", "scipy", "torch", "mkl", "sparse_dot_mkl")
PACKAGES += ("sparse", "tensora", "python-graphblas")
PACKAGES += ("torch_sparse", "torch_geometric", "dgl", "cupy-cuda12x", "cupy-cuda13x")


def commit(root: Path = ROOT) -> str:
    """The commit, with "+" appended if files differ from it; "" outside of a checkout."""
    if not (root / ".git").exists():  # installed, perhaps within another repository
        return ""
    try:
        run = lambda *args: subprocess.run(  # noqa: E731
            ["git", *args], cwd=root, check=True, capture_output=True, text=True
        ).stdout.strip()
        changed = run("status", "--porcelain", "--untracked-files=no", ":!bench/results")
        return run("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def circumstances(threads: int | list[int]) -> dict[str, Any]:
    """The machine, variables and versions that a figure depends on."""
    import sparsetir
    from sparsetir._versions import installed
    from sparsetir.machine import this_machine
    from sparsetir.records.task import cpu_model
    from sparsetir.schedules.targets import distinctive_features, host_features, host_target

    has, pool = host_features(), sparsetir.threads()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": cpu_model(),
        "llvm_cpu": str(host_target().attrs["mcpu"]),
        "cpu_features": distinctive_features(name for name in has if has[name]),
        "cores": len(this_machine().cpus),
        "load": os.getloadavg(),
        "threads": threads,
        "pool": {**pool._asdict(), "library": Path(pool.library).name},
        # Only the names of paths.
        "variables": {
            k: v.rsplit("/", 1)[-1] for k, v in os.environ.items() if k.startswith(OF_THREADS)
        },
        "python": platform.python_version(),
        "versions": {
            "sparsetir": sparsetir.__version__,
            **{name: version for name in PACKAGES if (version := installed(name))},
        },
    }


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print columns, the first one left-aligned and the others right-aligned."""
    text = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in text) for i in range(len(head))]
    print(f"\n{title}")
    for row in text:
        cells = [row[0].ljust(widths[0])]
        cells += [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells).rstrip())


class Form(NamedTuple):
    """Format of printed times: unit, digits, minima or medians."""

    unit: float = 1e3
    digits: int = 2
    of: str = "min"


MS = Form()


def beside(times: Mapping[str, Any], names: Sequence[str], base: str, form: Form = MS) -> list[str]:
    """Cells of a row: times of ways, and in brackets their ratio to one of them."""
    took = {n: seconds(t, form.of) for n, t in times.items()}
    texts = []
    for name in names:
        ratio = f" ({took[name] / took[base]:.2f})" if {name, base} <= took.keys() else ""
        texts.append(f"{form.unit * took[name]:.{form.digits}f}{ratio}" if name in took else "-")
    return texts


def seconds(times: Any, of: str = "min") -> float:
    """Seconds of a way: minimum and median, or only the minimum."""
    return times if isinstance(times, float | int) else times[of]


def geomean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers; NaN if there are none."""
    numbers = list(values)
    return statistics.geometric_mean(numbers) if numbers else math.nan


def show_times(
    title: str,
    cells: Sequence[Mapping[str, Any]],
    step: str,
    about: Sequence[str] | Mapping[str, Callable[[Any], Any]],
    base: str,
    form: Form = MS,
) -> None:
    """Print times of ways beside one of them: a line for each cell that has the step.

    about : keys of a cell, or, for each column before the times, a function of a cell
    """
    columns = about if isinstance(about, Mapping) else {key: itemgetter(key) for key in about}
    mine = [c for c in cells if c.get(step)]
    names = list(dict.fromkeys(n for c in mine for n in c[step]))
    rows = [
        [*(of(c) for of in columns.values()), *beside(c[step], names, base, form)] for c in mine
    ]
    if rows:
        table(title, [*columns, *names], rows)


def show_means(
    cells: Sequence[Mapping[str, Any]],
    step: str,
    base: str,
    group: Callable[[Any], str] = lambda cell: "",
) -> None:
    """Print how many times as fast one way is as each other one, by groups of cells."""
    for key in dict.fromkeys(map(group, cells)):
        mine = [c[step] for c in cells if group(c) == key and base in c.get(step, {})]
        for way in dict.fromkeys(n for times in mine for n in times if n != base):
            ratios = [seconds(t[way]) / seconds(t[base]) for t in mine if way in t]
            mean, worst, count = geomean(ratios), min(ratios), len(ratios)
            text = f"geometric mean {mean:.2f}, worst {worst:.2f}, {count} cells"
            print(f"{key}{': ' if key else ''}as fast as {way}: {text}")


def show_others(cells: Sequence[Mapping[str, Any]], name: Callable[[Any], str]) -> None:
    """Print, once each, peers that are missing or have no gradients, and all wrong results."""
    for kind, text in (("missing", "is missing"), ("no_gradient", "has no gradient here")):
        for peer, why in {n: w for c in cells for n, w in c.get(kind, {}).items()}.items():
            print(f"{peer} {text}: {why}")
    for cell in cells:
        for peer, error in cell["wrong"].items():
            print(f"wrong: {peer}, {name(cell)}: {error}")


def path_of(folder: Path, command: str, where: Mapping[str, Any]) -> Path:
    """The JSON file of a command; one per CPU (or GPU) and number of threads."""
    device = where.get("gpu") or f"{where['cpu']} {where['llvm_cpu']}"
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    threads = where["threads"] if isinstance(where["threads"], list) else [where["threads"]]
    return folder / f"{command}-{name}-{'-'.join(map(str, threads))}t.json"


def write(
    folder: Path, command: str, where: dict[str, Any], results: Any, quiet: bool = False
) -> Path:
    """Write the JSON file of a command."""
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(folder, command, where)
    record = {"command": command, **where, "results": results}
    write_whole(path, json.dumps(_short(record), indent=1) + "\n")
    if not quiet:
        if "gpu" not in where and "cpu_features" in where:
            features = " ".join(where["cpu_features"])
            print(f"\non {where['cpu']} ({features}), {where['cores']} cores")
        print(f"\nwritten: {path.name}")
    return path


def _short(value: Any) -> Any:
    """Numbers with five digits, more than the precision of any timing."""
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_short(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
