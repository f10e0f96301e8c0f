"""What configs of Sgap's algorithms are refused, and for which problems."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

import spmm_gpu_common
from sparsetir import ScheduleError
from sparsetir.schedules.gpu.spmm_groups import Groups
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.templates.registry import TEMPLATES

scheduled = functools.partial(spmm_gpu_common.scheduled, TEMPLATES[Groups, Spmm])

BAD = {
    "split": ({"split": "columns"}, "one of rows, non-zeros, got 'columns'"),
    "work": ({"work": 0}, "positive integer, got 0"),
    "rows": ({"split": "non-zeros", "rows": "x"}, "one of table, search, blocks, got 'x'"),
    "lanes": ({"lanes": 6}, "a power of two, got 6"),
    "group": ({"lanes": 64, "group": 64}, "a power of two up to 32, got 64"),
    "block": ({"block": 2048}, "a multiple of 8 threads .* at most 1024, got 2048"),
    "coarsen": ({"coarsen": 32}, "at most 64, got 128"),
    "occupancy": ({"occupancy": 4096}, "at most 2048, got 4096"),
    "vector": ({"vector": 3}, "1, 2, 4 or 8, got 3"),
    "feat": ({"feat": 30}, "a multiple of vector = 4, got 30"),
}
ILLEGAL = {  # combinations of legal fields, as the paper says (section 3.3)
    "group of several rows": ("group", {"lanes": 4, "group": 8}, "at most lanes = 4, .* got 8"),
    "shared non-zeros": ("lanes", {"split": "non-zeros", "lanes": 4}, "1 for split = .* got 4"),
    "groups of many rows": (
        "group", {"split": "non-zeros", "work": 4, "group": 8}, "1 for work = 4, .* got 8",
    ),
    "rows of rows": ("rows", {"rows": "search"}, "\"table\" for split = 'rows', got 'search'"),
    "half a group": (
        "block", {"lanes": 32, "group": 32, "block": 384}, "a multiple of 256 threads .* got 384",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "argument, fields, message",
    [(argument, *rest) for argument, rest in BAD.items()] + list(ILLEGAL.values()),
)
def test_bad_configs(argument: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"Groups: argument '{argument}': expected .*{message}"):
        Groups(**fields)


def test_refusals() -> None:
    with pytest.raises(ScheduleError, match="vectors of at most 4 float32, got 8"):
        scheduled(Spmm(), Groups(vector=8))
    with pytest.raises(ScheduleError, match="serves multiples of 32 features, got 40"):
        Groups().tiles(40)
    for config in (Groups(lanes=8, group=4), Groups("non-zeros", 4), Groups("non-zeros", group=8)):
        message = "expected rows in one group, .* for float16, which atomics do not add, got split="
        with pytest.raises(ScheduleError, match=f"Groups: argument 'config': {message}"):
            scheduled(Spmm("float16"), config)
        with pytest.raises(ScheduleError, match="expects? a sum of .*, got a max of float64"):
            scheduled(Spmm("float64", reduce="max"), replace(config, vector=2))
        assert not config.serves(Spmm("float16"))
        assert not config.serves(Spmm("float64", reduce="max"))
        assert config.serves(Spmm(reduce="max")) == (config.work == 1)
        assert config.serves(Spmm(reduce="mean"))
