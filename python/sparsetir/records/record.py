"""A record: what tuning found for a problem, and the key it is found again by."""

from __future__ import annotations

import hashlib
import json
import math
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timezone
from typing import Any

from sparsetir._versions import VERSIONS
from sparsetir.records.fingerprint import cpu_model, device_name
from sparsetir.records.task import Tunable
from sparsetir.runtime.targets import host_target, resolve_target
from sparsetir.schedules.default import is_gpu


@dataclass(frozen=True)
class Key:
    """What a record holds for; two tasks of one key have the same best config.

    op, reduce : of a user's function its name, and a hash of its text and of its schedule's
    heads : None for a single matrix, which is another problem than one of 1
    feat : 0 for a user's function, whose sizes are all in the fingerprint
    threads : of the CPU; 0 for a GPU, where they play no part
    target : the text of the resolved target, with the CPU or architecture it compiles for, and the
        features in which this machine's CPU differs from its name
    device : see :func:`sparsetir.records.fingerprint.device_name`
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
    def of(task: Tunable, device: str | None = None) -> Key:
        """The key of a task.

        device : by default what this machine has; a name of it where another machine measures
        """
        target = resolve_target(task.target)
        return Key(
            **task.identity(),
            threads=0 if is_gpu(target) else int(task.threads),
            target=str(target),
            device=device_name(target) if device is None else device,
        )

    def with_features(self) -> Key:
        """A key from before devices had features in their names, completed if it is this machine's.

        It is, for certain, where the model of the CPU is this one's, and the target says all of its
        features by the name that LLVM gives it. Others stay as they are, and apply nowhere.
        """
        if self.device != cpu_model():
            return self
        target = host_target()
        if target.attrs.get("mattr") or self.target != str(target):
            return self
        return replace(self, device=device_name(target))

    def text(self) -> str:
        """One line for a name: readable, and with the hash of all fields, so different for each."""
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
    """A config and what it was measured at.

    config : data of :func:`sparsetir.schedules.search.configs.to_data`
    seconds, default_seconds : of a call with this config and the default one, measured in turns
    compile_seconds, convert_seconds, padding, bytes : as in :class:`Outcome`
    statistics : of the matrix, see :func:`sparsetir.records.fingerprint.statistics`
    trials : how many configs were tried to find this one
    versions : of this package and of TVM, by the name of the package
    date : ISO 8601, UTC
    graph : a name for people, may be empty
    id : 32 hex digits of its own, so that no exchange of files doubles it
    """

    key: Key
    config: Mapping[str, Any]
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
        """Whether it is of these versions; plans take no others, which are kept all the same."""
        return self.versions == VERSIONS

    @property
    def order(self) -> tuple[float, float]:
        """Less is better, among records of a key: the share of the default's time, then seconds.

        Seconds alone would prefer what was measured while the machine was fast.
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


def record_to_data(record: Record) -> dict[str, Any]:
    """The record as JSON holds it, the fields of the key among the others.

    Raises ValueError for a field that :func:`record_from_data` would refuse.
    """
    data: dict[str, Any] = {f.name: getattr(record, f.name) for f in fields(record)}
    data |= asdict(data.pop("key"))
    for name in ("config", "statistics", "versions"):
        if isinstance(data[name], Mapping):
            data[name] = dict(data[name])
    _check(data)
    return data


def record_from_data(data: Any) -> Record:
    """A record of what :func:`record_to_data` gave.

    Raises ValueError that names a field which is unknown, missing or of the wrong type.
    """
    _check(data)
    keys = {f.name for f in fields(Key)}
    rest = {name: value for name, value in data.items() if name not in keys}
    return Record(key=Key(**{name: data[name] for name in keys}), **rest)


# Half of a pair: JSON can write it, and nothing else can.
_SURROGATE = re.compile("[\ud800-\udfff]")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not _SURROGATE.search(value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_count(value: Any) -> bool:
    return _is_integer(value) and value >= 0


def _is_number(value: Any) -> bool:
    return math.isfinite(value) if isinstance(value, float) else _is_integer(value)


def _is_duration(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_hex(value: Any) -> bool:
    return _is_text(value) and len(value) == 32 and set(value) <= set("0123456789abcdef")


def _is_date(value: Any) -> bool:
    try:
        datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return False
    return True


def _is_plain(value: Any) -> bool:
    """Whether JSON gives it back as it is."""
    if isinstance(value, dict):
        return all(_is_text(name) and _is_plain(x) for name, x in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | str) or _is_number(value)


def _is_config(value: Any) -> bool:
    return isinstance(value, dict) and _is_text(value.get("template")) and _is_plain(value)


def _maybe(check: Any) -> Any:
    return lambda value: value is None or check(value)


def _each(check: Any) -> Any:
    return lambda value: (
        isinstance(value, dict) and all(_is_text(name) and check(x) for name, x in value.items())
    )


# By field what is expected of it, in words and as a check.
_TEXT, _COUNT = ("a text", _is_text), ("0, 1, 2, ...", _is_count)
_NUMBER_OR_NONE = ("a number or none", _maybe(_is_number))
FIELDS: Mapping[str, tuple[str, Any]] = {
    "id": ("32 hex digits", _is_hex),
    "op": _TEXT,
    "dtype": _TEXT,
    "reduce": _TEXT,
    "heads": ("a count or none", _maybe(_is_count)),
    "feat": _COUNT,
    "threads": _COUNT,
    "target": _TEXT,
    "device": _TEXT,
    "shape_class": _TEXT,
    "fingerprint": ("32 hex digits", _is_hex),
    "config": ("a dict with the name of a 'template'", _is_config),
    "seconds": ("a number above 0", _is_duration),
    "default_seconds": ("a number above 0 or none", _maybe(_is_duration)),
    "compile_seconds": _NUMBER_OR_NONE,
    "convert_seconds": _NUMBER_OR_NONE,
    "padding": _NUMBER_OR_NONE,
    "bytes": ("a count or none", _maybe(_is_count)),
    "statistics": ("a dict of numbers", _each(_is_number)),
    "trials": _COUNT,
    "versions": ("a dict of texts", _each(_is_text)),
    "date": ("a date as '2026-01-31T12:00:00+00:00'", _is_date),
    "graph": _TEXT,
}


def _check(data: Any) -> None:
    if not isinstance(data, dict):
        raise ValueError(f"expected a dict, got {type(data).__name__}")
    for name in data:
        if name not in FIELDS:
            raise ValueError(f"unknown field {name!r}")
    for name, (expected, check) in FIELDS.items():
        if name not in data:
            raise ValueError(f"field {name!r} is missing")
        if not check(data[name]):
            raise ValueError(f"field {name!r}: expected {expected}, got {data[name]!r}")
