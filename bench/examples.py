"""Schedules that are examples of the checkout."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from sparsetir.bench.report import ROOT


def example(command: str, name: str) -> Any:
    """A module of the folder `examples`; raises SystemExit where there is no checkout."""
    folder = ROOT / "examples"
    if not (folder / f"{name}.py").exists():
        raise SystemExit(
            f"{command}: takes a checkout of the repository, whose examples/ it measures"
        )
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
