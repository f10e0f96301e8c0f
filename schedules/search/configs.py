"""Configs of templates as JSON data, and back.

>>> from sparsetir.formats import Hyb
>>> from sparsetir.schedules.templates.decomposed import Decomposed
>>> to_data(Decomposed(Hyb(1, 3)))["format"]
{'format': 'Hyb', 'c': 1, 'k': 3}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import numpy as np

from sparsetir.formats import Format
from sparsetir.formats.format import REGISTRY
from sparsetir.schedules.template import Choices
from sparsetir.schedules.templates.registry import TEMPLATES

# Templates of older versions: their names now, and fields that theirs lacked, or had otherwise.
OLDER = {
    "RowBlocks": ("RowTile", {"prefetch": 8}),
    "SortedRows": ("RowTile", {"tile": 32, "tiles_first": False, "window": 4096}),
    "PanelRows": ("RowTile", {"tile": 64, "rows": 4}),
    "RelationalTensorCores": (
        "RelationalRows", {"depth": 32, "vectors": (8, 8), "shape": None, "shares": (2, 2)},
    ),
}  # fmt: skip
# Fields of older versions: what the default schedule now does, and what was never fastest.
OUTGROWN = {"Decomposed": {"tile", "lanes", "feat"}, "RowTile": {"compact"}}


def is_choice(value: Any) -> bool:
    """Whether a value may be among the choices: JSON preserves it."""
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int | str)


def to_data(config: Any) -> dict[str, Any]:
    """A config as JSON data: `{"template": "RowTile", "tile": 64, ...}`.

    Formats, and configs in a config, are nested. :class:`Choices` are
    `{"template": "Choices", "values": {...}}`.

    Raises ValueError for objects that are no template's config, and for formats that are not data.
    """
    if isinstance(config, Choices):
        return {"template": "Choices", "values": dict(config)}
    return _to_data("to_data", "template", config)


def from_data(data: Mapping[str, Any]) -> Any:
    """The config from which :func:`to_data` made data.

    A missing field has its default, so that data of older versions can be read. Raises
    ValueError naming what is unknown (template, format or field), missing or an invalid value.
    """
    if isinstance(data, Mapping) and data.get("template") == "Choices":
        return _choices(data)
    return _from_data("from_data", "template", data)


def _choices(data: Mapping[str, Any]) -> Choices:
    values = data.get("values")
    if set(data) != {"template", "values"} or not isinstance(values, Mapping):
        raise ValueError(f"from_data: expected Choices with a dict of 'values', got {dict(data)!r}")
    for name, value in values.items():
        if not is_choice(value):
            raise ValueError(
                f"from_data: Choices: {name!r}: expected a number, text or None, got {value!r}"
            )
    return Choices(values)


def _known(kind: str) -> Mapping[str, type]:
    """The classes by name; other modules may register templates after this one is loaded."""
    if kind == "format":
        return {name: entry.kind for name, entry in REGISTRY.items()}
    return {config.__name__: config for config, _ in TEMPLATES}


def _to_data(caller: str, kind: str, value: Any) -> dict[str, Any]:
    classes, name = _known(kind), type(value).__name__
    if classes.get(name) is not type(value):
        raise ValueError(f"{caller}: expected a {kind} of {', '.join(sorted(classes))}, got {name}")
    out: dict[str, Any] = {kind: name}
    for field in fields(value):
        out[field.name] = _plain(caller, f"{name}.{field.name}", getattr(value, field.name))
    return out


def _plain(caller: str, where: str, value: Any) -> Any:
    if isinstance(value, Format):
        return _to_data(caller, "format", value)
    if is_dataclass(value):  # a nested config
        return _to_data(caller, "template", value)
    if isinstance(value, tuple | list):
        return [_plain(caller, where, v) for v in value]
    return _scalar(caller, where, value.item() if isinstance(value, np.generic) else value)


def _scalar(caller: str, where: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{caller}: {where}: expected a value that JSON holds, got {value!r}")


def _from_data(caller: str, kind: str, data: Any) -> Any:
    classes = _known(kind)
    if not isinstance(data, Mapping):
        raise ValueError(f"{caller}: expected a dict with '{kind}', got {data!r}")
    if kind not in data:
        raise ValueError(f"{caller}: '{kind}' is missing in {dict(data)!r}")
    name = data[kind]
    if isinstance(name, str) and kind == "template" and name in OLDER and name not in classes:
        name, defaults = OLDER[name]
        data = {**defaults, **data}
    if not isinstance(name, str) or name not in classes:
        raise ValueError(
            f"{caller}: unknown {kind} {name!r}; expected one of {', '.join(sorted(classes))}"
        )
    wanted = {f.name: f for f in fields(classes[name])}
    outgrown = {kind, *OUTGROWN.get(name, ())}
    entries = {key: value for key, value in data.items() if key not in outgrown}
    for key in entries:
        if key not in wanted:
            raise ValueError(
                f"{caller}: unknown field '{key}' of {name}; expected some of {', '.join(wanted)}"
            )
    for key, field in wanted.items():
        if key not in entries and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{caller}: field '{key}' of {name} is missing")
    values = {key: _value(caller, f"{name}.{key}", value) for key, value in entries.items()}
    try:
        return classes[name](**values)
    except TypeError as error:
        raise ValueError(f"{caller}: {name}: {error}") from error


def _value(caller: str, where: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return _from_data(caller, "template" if "template" in value else "format", value)
    if isinstance(value, list | tuple):
        return tuple(_value(caller, where, v) for v in value)
    return _scalar(caller, where, value)
