"""An NVIDIA GPU in place of the processes of peers: `run --target cuda`."""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import sparsetir
from bench.harness import cuda
from bench.machine import limit
from bench.peers.gpu import COPIES, Gpu
from sparsetir.tuning.case import Case

ROUNDS, CALLS = 5, 20
QUICK_ROUNDS, QUICK_CALLS = 2, 3
PEAK_SIZE, COPIED = 8192, 2**28  # rows of a dense product; elements of a copy
TARGET = "cuda"  # in place of a number of threads


class OnGpu:
    """The device, and what is measured on it; see :class:`bench.run.Processes`."""

    def __init__(self, torch: Any, args: argparse.Namespace) -> None:
        warnings.filterwarnings("ignore", message="Sparse", category=UserWarning)
        torch.set_grad_enabled(False)
        torch.backends.cuda.matmul.allow_tf32 = False
        self.torch, self.peers = torch, args.peers
        rounds, calls = (QUICK_ROUNDS, QUICK_CALLS) if args.quick else (ROUNDS, CALLS)
        self.gpu = Gpu(torch, rounds, calls)
        self.bandwidth = self._bandwidth()
        self.peaks = {dtype: self._peak(dtype) for dtype in args.dtype}
        self.many = 1

    @classmethod
    def of(cls, args: argparse.Namespace) -> OnGpu | None:
        """None, which is told, where there is no device."""
        torch = cuda()
        return None if torch is None else cls(torch, args)

    def measured(self, case: Case) -> list[dict[str, Any]]:
        """One cell."""

        def default() -> Any:
            return sparsetir.plan(case.op, case.matrix, case.feat, dtype=case.dtype, target=TARGET)

        least = limit(case, self.bandwidth, self.peaks[case.dtype])
        found = self.gpu.compare(case, {"default": default}, self.peers)
        return [{"threads": TARGET, "limit": least, **found}]

    def about(self) -> dict[str, Any]:
        """Settings, and how many kernels were compiled."""
        settings = {"rounds": self.gpu.rounds, "calls": self.gpu.calls, "copies": COPIES}
        return {"settings": settings, "compilations": sparsetir.compilations()}

    def close(self) -> None:
        """Nothing is to end."""

    def _bandwidth(self) -> float:
        torch = self.torch
        a, b = (torch.ones(COPIED, dtype=torch.float32, device="cuda") for _ in range(2))
        best = min(self.gpu.clock.seconds(lambda: b.copy_(a)) for _ in range(8))
        return 2 * a.numel() * 4 / best

    def _peak(self, dtype: str) -> float:
        torch = self.torch
        kind = getattr(torch, dtype)
        a, b = (torch.ones(PEAK_SIZE, PEAK_SIZE, dtype=kind, device="cuda") for _ in range(2))
        best = min(self.gpu.clock.seconds(lambda: torch.mm(a, b)) for _ in range(8))
        return 2 * PEAK_SIZE**3 / best
