"""`python -m bench gpu_day`: all measurements that need a GPU, most important first.

Each step is a separate process, which writes its own files; its outcome is written before the next
one begins, so that a machine that goes away loses one step. A step that takes too long is ended,
with all processes that it has started, and the next one has its turn.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.harness import chosen, cuda
from bench.report import circumstances, table, write
from bench.timing import progress

TAIL = 2000  # characters kept of a step's output, from its end


@dataclass(frozen=True)
class Step:
    """A command, and the largest share of the total time that it may take."""

    name: str
    command: tuple[str, ...]
    share: float


def steps(target: str, quick: bool, out: Path) -> list[Step]:
    """The steps, in order.

    target : "cuda", or "cpu" for a rehearsal without a GPU
    quick : small sizes
    """
    rehearsal = target == "cpu"
    out_text = shlex.quote(str(out))
    where = f"--out {out_text}" + " --quick" * quick
    on = f"{where} --target {target}" + " --seconds 2" * rehearsal
    run = f"sparsetir bench run {where} --target {target}"
    feat = "" if quick else "--feat 32 128 512"
    graphs = "" if quick else "--graph synthetic:cora synthetic:pubmed synthetic:ogbn-arxiv"
    tests = "-x tests/test_cuda_runner.py" if quick else "--maxfail=20 tests -k"
    words = () if quick else ("cuda or gpu or groups or thesis",)
    masks = "--mask band --peers dense" if rehearsal else ""
    tune = f"--target {'llvm' if rehearsal else target} --records {out_text}/gpu_day-records.jsonl"
    tune += " --trials 2 --seconds 20" if quick else " --seconds 120"
    commands = {
        "tests": (f"pytest -q {tests}", 0.3),
        "spmm": (f"{run} --op spmm {feat} {graphs}", 0.3),
        "sddmm": (f"{run} --op sddmm {feat} {graphs}", 0.2),
        "spmv": (f"{run} --op spmv {graphs}", 0.1),
        "blocks": (f"sparsetir bench blocks {on}", 0.3),
        "attention": (f"sparsetir bench attention {on} {masks}", 0.2),
        "tune": (f"sparsetir tune spmm --graph cora --feat 32 --no-report {tune}", 0.15),
    }
    python = (sys.executable, "-m")
    listed = [Step(n, (*python, *shlex.split(c)), share) for n, (c, share) in commands.items()]
    listed[0] = replace(listed[0], command=(*listed[0].command, *words))
    return listed


def run(args: argparse.Namespace) -> None:
    """The command."""
    if args.target == "cuda" and cuda() is None:
        return
    args.out.mkdir(parents=True, exist_ok=True)
    todo = steps(args.target, args.quick, args.out)
    names = chosen("gpu_day", args.only, (s.name for s in todo))
    todo = [s for s in todo if s.name in names]
    facts = circumstances(args.threads)
    begun, cells = time.monotonic(), []
    for number, step in enumerate(todo):
        left = args.minutes * 60 - (time.monotonic() - begun)
        progress(f"{number + 1} of {len(todo)}: {step.name}, {left / 60:.0f} minutes left")
        limit = min(left, step.share * args.minutes * 60)
        cells.append(outcome(step, limit))
        write(args.out, "gpu_day", facts, {"target": args.target, "steps": cells})
    progress("")
    rows = [
        [c["step"], c["state"], f"{c['seconds']:.0f}", " ".join(c["command"][2:7])] for c in cells
    ]
    table(f"A day on {args.target}; seconds", ["step", "state", "s", "command"], rows)
    if any(c["state"] == "failed" for c in cells):
        raise SystemExit(1)


def outcome(step: Step, limit: float, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The outcome of a step with a limit in seconds, and with some environment variables."""
    begun, record = time.monotonic(), {"step": step.name, "command": list(step.command)}
    if limit < 1:
        return {**record, "state": "no time", "seconds": 0.0, "printed": "no time"}
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    piped |= {"text": True, "errors": "replace", "start_new_session": True}
    piped["env"] = {**os.environ, **(variables or {})}
    with subprocess.Popen(step.command, **piped) as process:
        try:
            text, _ = process.communicate(timeout=limit)
            state = "done" if process.returncode == 0 else "failed"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text, _ = process.communicate()
            state = "ended"
    record |= {"state": state, "limit": limit, "code": process.returncode}
    return {**record, "seconds": time.monotonic() - begun, "printed": text[-TAIL:]}
