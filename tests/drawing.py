"""How tests draw random examples: the same ones in each run, however long they take."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck

COMMON: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
