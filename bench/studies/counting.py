"""What schedules for GPUs do, counted without one: their CUDA text runs on the CPU.

The runner is that of the tests (`tests/cuda_runner.py`), so it takes a checkout and g++. Blocks,
warps and lanes are run one after the other, and each access to memory is looked at; how long
anything takes on a GPU is not said by it.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Mapping
from typing import Any

from bench.report import ROOT

# What a count is, by its name in JSON files.
MEANINGS = {
    "sectors": "of 32 bytes of global memory, per instruction of a warp",
    "instructions": "of warps, that touch memory",
    "active_lanes": "of those instructions, of 32 each at best; the others have diverged",
    "shuffles": "of lanes",
    "atomics": "of lanes",
    "conflicts": "atomics on an address that another lane of the same instruction changes",
    "blocks": "of the main launch, which has the most instructions",
    "imbalance": "instructions of the longest block of the main launch over those of its mean one",
    "warp_imbalance": "the same of warps",
}


def runner() -> Any:
    """The module that runs programs as CUDA text.

    Raises SystemExit where the checkout's tests, g++ or pytest is missing.
    """
    folder = ROOT / "tests"
    if not (folder / "cuda_runner.py").exists():
        raise SystemExit(
            "study: --counts takes a checkout of the repository, whose tests/cuda_runner.py counts"
        )
    if shutil.which("g++") is None:
        raise SystemExit(
            "study: --counts takes g++, which compiles the CUDA text, and it is missing"
        )
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    try:
        return importlib.import_module("cuda_stages")
    except ModuleNotFoundError as error:
        raise SystemExit(f"study: --counts takes {error.name}, which is missing") from error


class Counted:
    """A program with a schedule for GPUs, which counts what it does.

    schedule, config : as for `sparsetir.lower`
    """

    def __init__(self, program: Any, schedule: Any, config: Any = None) -> None:
        self._kernel = runner().CudaStages(program, schedule, config)

    def __call__(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
        """The arrays as the kernel leaves them, and the counts: see `MEANINGS`."""
        # Races are looked for by the tests, which takes much longer.
        out = self._kernel(arguments, seeds=(0,), races=False, count=True)
        function = self._kernel.function
        return out, _summary(function.counts, function.launch_counts, function.launches)


def _summary(total: Any, launches: list[Any], shapes: list[Any]) -> dict[str, float]:
    main, (_, grid, block) = max(zip(launches, shapes, strict=True), key=_work)
    warps = main.blocks * -(-block[0] * block[1] * block[2] // 32)
    most = max(1, main.instructions)
    return {
        "sectors": total.sectors, "instructions": total.instructions,
        "active_lanes": total.lanes / (32 * max(1, total.instructions)),
        "shuffles": total.shuffles, "atomics": total.atomics, "conflicts": total.conflicts,
        "blocks": grid[0] * grid[1] * grid[2],
        "imbalance": main.longest_block * main.blocks / most,
        "warp_imbalance": main.longest_warp * warps / most,
    }  # fmt: skip


def _work(launch: Any) -> int:
    return launch[0].instructions
