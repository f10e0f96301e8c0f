"""Schedules that are examples."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from bench.report import ROOT


def example(name: str) -> Any:
    """A module of the folder `examples`."""
    folder = ROOT / "examples"
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
