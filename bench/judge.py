"""Verdict on two runs: slower, faster and broken cells."""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from bench.peers.libraries import BEFORE, OURS
from bench.report import table
from bench.summary import device, show_speed_ups, summarise

NOISE = 3.0  # a change must exceed the noise of both runs by this factor


def run(args: argparse.Namespace) -> None:
    """The command; status 1 if something got slower, or is now wrong or fails."""
    second = args.after or args.before
    before, after = (json.loads(p.read_text()) for p in (args.before, second))
    for path, record in ((args.before, before), (second, after)):
        if not str(record.get("command")).startswith("run"):
            raise SystemExit(f"judge: {path} is not of `python -m bench run`")
    for key in ("cpu", "gpu"):
        if before.get(key) != after.get(key):
            print(f"not the same {key}: {before.get(key)} and {after.get(key)}")
    cells = after["results"]["cells"]
    if args.after is None:
        held = [c for c in cells if BEFORE in c.get("peers", {})]
        if not held:
            raise SystemExit(f"judge: {args.before} has no runs of another version (--before)")
        first = [{**c, "peers": {OURS: c["peers"][BEFORE]}} for c in held]
        show_speed_ups([x for x in summarise(held) if x["peer"] == BEFORE])
        verdict = judge(first, held, args.least)
    else:
        verdict = judge(before["results"]["cells"], cells, args.least)
    show(verdict)
    if verdict["slower"] or verdict["broken"]:
        raise SystemExit(1)


def judge(
    before: list[dict[str, Any]], after: list[dict[str, Any]], least: float
) -> dict[str, Any]:
    """Compare cells of the same name: `slower`, `faster`, `same`, `missing`, `new`, `broken`.

    least : the smallest change that counts, as a fraction

    A machine's speed varies: changes are relative to those of the peers (`drift`: their median, by
    number of threads). A change counts if it is larger than `least` and than three times the noise
    of both runs.
    """
    old, new = ({_name(c): c for c in cells} for cells in (before, after))
    drift = _drift(old, new)
    out: dict[str, Any] = {"slower": [], "faster": [], "same": [], "drift": drift}
    out["missing"] = [n for n in old if _ours(old[n]) and not _ours(new.get(n))]
    out["new"] = [n for n in new if _ours(new[n]) and not _ours(old.get(n))]
    bad = [(n, how, c.get(how, {})) for n, c in new.items() for how in ("wrong", "failed")]
    out["broken"] = [(n, how, why[OURS]) for n, how, why in bad if OURS in why]
    for name in old:
        first, second = _ours(old[name]), _ours(new.get(name))
        if first is None or second is None:
            continue
        change = second["min"] / first["min"] / drift.get(old[name]["threads"], 1.0)
        noise = max(least, NOISE * (first["noise"] + second["noise"]))
        kind = "slower" if change > 1 + noise else "faster" if change < 1 / (1 + noise) else "same"
        out[kind].append((name, first["min"], second["min"], change, noise))
    return out


def _name(cell: dict[str, Any]) -> str:
    words = [cell["problem"], cell["op"], f"d = {cell['feat']}", cell["dtype"]]
    return ", ".join([*words, device(cell["threads"])])


def _ours(cell: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if cell is None else cell["peers"].get(OURS)


def _drift(old: dict[str, Any], new: dict[str, Any]) -> dict[int | str, float]:
    changes: dict[int | str, list[float]] = {}
    for name, cell in old.items():
        for peer, times in cell["peers"].items():
            again = new.get(name, {"peers": {}})["peers"].get(peer)
            if again and not peer.startswith(OURS):
                changes.setdefault(cell["threads"], []).append(again["min"] / times["min"])
    return {threads: statistics.median(c) for threads, c in changes.items()}


def show(verdict: dict[str, Any]) -> None:
    """Print the changes, the worst first."""
    rows = [
        [kind, name, f"{a * 1e3:.3f}", f"{b * 1e3:.3f}", f"x{change:.2f}", f"{noise:.0%}"]
        for kind in ("slower", "faster")
        for name, a, b, change, noise in sorted(verdict[kind], key=lambda r: -r[3])
    ]
    table("What changed", ["", "", "before (ms)", "after (ms)", "change", "noise"], rows)
    for threads, drift in verdict["drift"].items():
        print(f"peers, {device(threads)}: x{drift:.2f}, by which changes are corrected")
    for kind in ("missing", "new"):
        for name in verdict[kind]:
            print(f"{kind}: {name}")
    for name, state, why in verdict["broken"]:
        print(f"{state}: {name}: {why}")
    kinds = ("slower", "faster", "same", "missing", "new")
    print(", ".join(f"{len(verdict[kind])} {kind}" for kind in kinds))
