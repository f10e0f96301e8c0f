"""Speed-ups over peers in numbers and tables."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product
from operator import itemgetter
from typing import Any

from bench.peers.libraries import BEFORE, FLOAT32, OURS
from bench.peers.mkl import CODES
from bench.report import Form, geomean, show_times, table

NO_PEERS = (FLOAT32, BEFORE)  # not alternatives for users
BEST = "best peer"


def measured(cells: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cells in which sparsetir has a time."""
    return [c for c in cells if OURS in c.get("peers", {})]


def group(cell: dict[str, Any]) -> tuple[str, str, int | str]:
    """The key of a table: operator, dtype, threads."""
    return cell["op"], cell["dtype"], cell["threads"]


def device(threads: int | str) -> str:
    """The number of threads in words; for a GPU its target."""
    return threads if isinstance(threads, str) else f"{threads} thread(s)"


def peer_time(cell: dict[str, Any], peer: str, of: str = "min") -> float | None:
    """Seconds of a peer, or of the fastest real one; None if there are none."""
    times = {n: p[of] for n, p in cell["peers"].items() if n != OURS}
    if peer != BEST:
        return times.get(peer)
    return min((t for n, t in times.items() if n not in NO_PEERS), default=None)


def summarise(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Geometric means and lowest speed-ups by group, class of problems and peer."""
    out = []
    done = measured(cells)
    for key in dict.fromkeys(group(c) for c in done):
        mine = [c for c in done if group(c) == key]
        kinds = list(dict.fromkeys(c["class"] for c in mine))
        peers = dict.fromkeys(n for c in mine for n in c["peers"] if n != OURS)
        every = [*peers, BEST] if set(peers) - set(NO_PEERS) else [*peers]
        for peer, kind in product(every, ["all", *kinds] if len(kinds) > 1 else ["all"]):
            part = [c for c in mine if kind in ("all", c["class"])]
            both = [c for c in part if peer_time(c, peer) is not None]
            if both:
                about = dict(zip(("op", "dtype", "threads"), key, strict=True))
                out.append({**about, "peer": peer, "class": kind, **_speed_ups(both, peer)})
    return out


def _speed_ups(cells: list[dict[str, Any]], peer: str) -> dict[str, Any]:
    lowest = min(cells, key=lambda c: ratio(c, peer))
    means = {of: geomean(ratio(c, peer, of) for c in cells) for of in ("min", "median")}
    summary = {"cells": len(cells), "geomean": means["min"], "geomean_of_medians": means["median"]}
    where = f"{lowest['problem']}, d = {lowest['feat']}"
    return {**summary, "lowest": ratio(lowest, peer), "lowest_at": where}


def ratio(cell: dict[str, Any], peer: str, of: str = "min") -> float:
    """The peer's time over ours."""
    time = peer_time(cell, peer, of)
    assert time is not None
    return time / cell["peers"][OURS][of]


def show(results: dict[str, Any]) -> None:
    """Print times, preparation costs, speed-ups, and notes."""
    cells = results["cells"]
    for key in dict.fromkeys(map(group, cells)):
        _show_times(key, [c for c in cells if group(c) == key])
    if measured(cells):
        _show_costs(measured(cells))
    if results["summary"]:
        show_speed_ups(results["summary"])
        print(f"{BEST}: the fastest one of each cell, without {FLOAT32}.")
    _show_versions(cells)
    _show_missing(cells)
    _show_disturbed(cells)
    for cell in cells:
        for kind in ("failed", "wrong"):
            for peer, reason in cell[kind].items():
                where = f"{cell['problem']}, {cell['op']}, d = {cell['feat']}, {cell['dtype']}"
                print(f"{kind}: {peer}: {where}, {device(cell['threads'])}: {reason}")


def _show_times(key: tuple[str, str, int | str], cells: list[dict[str, Any]]) -> None:
    op, dtype, threads = key
    about = {"": itemgetter("problem"), "nnz": itemgetter("nnz"), "d": itemgetter("feat")}
    title = f"{op}, {dtype}, {device(threads)}: ms, and times {OURS}'s"
    show_times(title, cells, "peers", {**about, "fastest": fastest}, OURS, Form(digits=3))
    done = [c for c in measured(cells) if peer_time(c, BEST) is not None]
    lost = [c for c in done if fastest(c) != OURS]
    if done:
        print(f"{OURS} is the fastest in {len(done) - len(lost)} of {len(done)} cells.")
    for cell in sorted(lost, key=lambda c: ratio(c, BEST)):
        where = f"{cell['problem']}, d = {cell['feat']}"
        print(f"lost: {where}: {1 / ratio(cell, BEST):.2f} times as long as {fastest(cell)}")


def fastest(cell: dict[str, Any]) -> str | None:
    """The fastest library, including sparsetir; None if none has a time."""
    times = {n: p["min"] for n, p in cell["peers"].items() if n not in NO_PEERS}
    return min(times, key=times.__getitem__, default=None)


def _show_costs(cells: list[dict[str, Any]]) -> None:
    rows = []
    for cell in cells:
        ours = cell["peers"][OURS]
        plan = ours["about"]["plans"][ours["variant"]]
        config = ", ".join(f"{k}={v}" for k, v in plan["config"].items())
        row = [cell[k] for k in ("problem", "op", "feat", "dtype", "threads")]
        row += [f"{plan['convert_seconds'] * 1e3:.2f}", f"{plan['compile_seconds'] * 1e3:.0f}"]
        row += [plan["launches"], f"{plan['padding']:.1%}", ours["variant"]]
        rows.append([*row, f"{plan['template']}({config})"])
    head = ["", "op", "d", "dtype", "threads", "convert (ms)", "compile (ms)", "launches"]
    table(f"Before the first call of {OURS}", [*head, "padding", "plan", "config"], rows)


def show_speed_ups(lines: list[dict[str, Any]]) -> None:
    """A line for each group and peer, see `summarise`."""
    rows = [[f"{x:.3f}" if isinstance(x, float) else x for x in line.values()] for line in lines]
    head = ["op", "dtype", "threads", "peer", "problems", "cells", "speed-up", "of medians"]
    title = f"Speed-up of {OURS} over peers, geometric mean"
    table(title, [*head, "lowest", "at"], rows)


def _show_versions(cells: list[dict[str, Any]]) -> None:
    """Print versions of libraries that report them, and the code they run on this CPU."""
    peers = [entry for c in cells for entry in c["peers"].items()]
    about_by_peer = {name: p["about"] for name, p in peers if "version" in p.get("about", {})}
    for name, about in about_by_peer.items():
        print(f"{name}: {about['version']}")
        if "code" in about:
            by = f", with {', '.join(about['preloaded'])} preloaded" if "preloaded" in about else ""
            print(f"{name} runs its {CODES[about['code']]} on this CPU{by}")


def _show_missing(cells: list[dict[str, Any]]) -> None:
    operators: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        for peer, reason in cell["missing"].items():
            operators.setdefault((peer, reason), []).append(f"{cell['op']} {cell['dtype']}")
    for (peer, reason), where in operators.items():
        kinds = f" ({', '.join(dict.fromkeys(where))})" if len(where) < len(cells) else ""
        print(f"missing: {peer}{kinds}: {reason}")


def _show_disturbed(cells: list[dict[str, Any]]) -> None:
    """Report peers most of whose turns were disturbed."""
    disturbed = [
        [n for n, p in c["peers"].items() if p.get("quiet", math.inf) < p.get("turns", 0) / 2]
        for c in cells
    ]
    if names := dict.fromkeys(n for peers in disturbed for n in peers):
        count = sum(map(bool, disturbed))
        print(f"disturbed by other processes: {count} of {len(cells)} cells ({', '.join(names)})")
