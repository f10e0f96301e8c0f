"""A record: the config that tuning found for a problem, and the key that identifies the problem."""

from __future__ import annotations

import hashlib
import json
import math
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from sparsetir._versions import VERSIONS
from sparsetir.records.task import Task, device_name, fingerprint, shape_class
from sparsetir.schedules.targets import TargetLike, is_gpu, resolve_target


@dataclass(frozen=True)
class Key:
    """The problem of a record; two tasks with equal keys have the same best config.

    op, reduce : for a user's function its name, and a hash of its text and of its schedule's
    heads : None for a single matrix, which is a different problem than one head
    feat : 0 for a user's function, whose sizes are all in the fingerprint
    threads : threads of the CPU; 0 for a GPU, for which they do not matter
    target : the text of the resolved target, with the CPU or architecture it compiles for, and the
        features in which this machine's CPU differs from the named one
    device : see :func:`sparsetir.records.task.device_name`
    """

    op: str
    dtype: str
    reduce: str
    heads: int | None
    feat: int
    threads: int
    target: str
    device: str
    shape_class: str
    fingerprint: str

    @staticmethod
    def of(task: Task, device: str | None = None) -> Key:
        """The key of an operator's task; device : see :meth:`on`."""
        return Key.on(
            task.target, task.threads, device, op=task.op, dtype=task.dtype, reduce=task.reduce,
            heads=None if task.heads is None else int(task.heads), feat=int(task.feat),
            shape_class=shape_class(task), fingerprint=fingerprint(task.matrix),
        )  # fmt: skip

    @staticmethod
    def on(target: TargetLike, threads: int, device: str | None = None, **fields: Any) -> Key:
        """Make the key of the other fields on a target.

        device : name of the device, if another machine measures; by default this machine's
        """
        target = resolve_target(target)
        number = 0 if is_gpu(target) else int(threads)
        device = device_name(target) if device is None else device
        return Key(**fields, threads=number, target=str(target), device=device)

    def text(self) -> str:
        """A readable line, unique to the key as it ends with the hash of all fields."""
        heads = "" if self.heads is None else f"-h{self.heads}"
        whole = json.dumps(asdict(self), sort_keys=True)
        digest = hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()
        return (
            f"{self.op}-{self.dtype}-{self.reduce}{heads}-feat{self.feat}-t{self.threads}-"
            f"{self.shape_class}-{self.fingerprint[:8]}-{digest}"
        )


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Record:
    """A config and its measurement.

    config : data of :func:`sparsetir.schedules.search.configs.to_data`
    seconds, default_seconds : times of a call with this config and with the default, in turns
    compile_seconds, convert_seconds, padding, bytes : see :class:`Outcome`
    statistics : statistics of the matrix, see :func:`sparsetir.records.task.statistics`
    trials : number of configs tried to find this one
    versions : versions of this package and of TVM, by package
    date : ISO 8601, UTC
    graph : a display name, may be empty
    id : 32 unique hex digits, so that exchanging files creates no duplicates
    """

    key: Key
    config: Mapping[str, object]
    seconds: float
    default_seconds: float | None = None
    compile_seconds: float | None = None
    convert_seconds: float | None = None
    padding: float | None = None
    bytes: int | None = None
    statistics: Mapping[str, float] = field(default_factory=dict)
    trials: int = 0
    versions: Mapping[str, str] = field(default_factory=VERSIONS.copy)
    date: str = field(default_factory=_now)
    graph: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def is_current(self) -> bool:
        """Whether these versions made it; plans ignore other records, which are kept."""
        return self.versions == VERSIONS

    @property
    def order(self) -> tuple[float, float]:
        """A sort key for records of a problem, best first: share of the default's time, seconds.

        Seconds alone would favour records measured while the machine was fast.
        """
        default = self.default_seconds
        return (1.0 if default is None else self.seconds / default), self.seconds


def best_of_each(records: Iterable[Record]) -> dict[Key, Record]:
    """The best record of each key, by :attr:`Record.order`; of equal ones the first."""
    best: dict[Key, Record] = {}
    for record in records:
        if record.key not in best or record.order < best[record.key].order:
            best[record.key] = record
    return best


def record_to_data(record: Record) -> dict[str, object]:
    """Convert a record to data for JSON, with the key's fields among the others."""
    data = asdict(record)
    return {**data.pop("key"), **data}


def record_from_data(data: object) -> Record:
    """Convert a result of :func:`record_to_data` back to the record.

    Raises ValueError that names an unknown or missing field, or one of the wrong type.
    """
    if not isinstance(data, dict):
        raise ValueError(f"expected a dict, got {type(data).__name__}")
    of_key, of_record = get_type_hints(Key), get_type_hints(Record)
    hints = {**of_key, **of_record}
    del hints["key"]
    for name in data:
        if name not in hints:
            raise ValueError(f"unknown field {name!r}")
    for name, hint in hints.items():
        if name not in data:
            raise ValueError(f"field {name!r} is missing")
        if not _fits(data[name], hint):
            raise ValueError(f"field {name!r}: expected {_words(hint)}, got {data[name]!r}")
    record = Record(
        Key(**{name: data[name] for name in of_key}),
        **{name: data[name] for name in of_record if name != "key"},
    )
    if record.seconds <= 0 or (record.default_seconds or 1) <= 0:
        raise ValueError("expected 'seconds' and 'default_seconds' above 0")
    return record


def _fits(value: object, hint: Any) -> bool:
    """Whether a value of JSON has the type that annotates a field of a record."""
    if get_origin(hint) is UnionType:
        return any(_fits(value, one) for one in get_args(hint))
    if get_origin(hint) is Mapping:
        of = get_args(hint)[1]
        return isinstance(value, dict) and all(_fits(x, of) for x in value.values())
    if hint is float:  # JSON may write 1.0 as 1
        whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
        return whole or (isinstance(value, float) and math.isfinite(value))
    return isinstance(value, hint) and not (hint is int and isinstance(value, bool))


def _words(hint: object) -> str:
    return getattr(hint, "__name__", None) or str(hint).replace("collections.abc.", "")
