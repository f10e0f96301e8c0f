"""Placeholder until the verifier lands."""
from __future__ import annotations
from typing import Any
def verify(func: Any) -> None:
    return None
