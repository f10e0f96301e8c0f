"""Packages that only some functions need, and extensions that the core does without."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from importlib.util import find_spec
from types import ModuleType
from typing import NoReturn

# The first statements of a process that needs no torch, which TVM would otherwise import.
WITHOUT_TORCH = "import sparsetir, sys; sys.modules['torch'] = None"


def allow_torch() -> None:
    """Let the user's modules import torch after TVM has been loaded without it."""
    if sys.modules.get("torch", ...) is None:
        del sys.modules["torch"]


def need(caller: str, package: str, extra: str | None = None, title: str = "") -> ModuleType:
    """Import a package; if it is missing, raise ImportError that names what to install.

    extra : extra of sparsetir that includes it; None for an extension, a module of sparsetir itself
    title : its usual name; by default the name by which it is imported
    """
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if not f"{package}.".startswith(f"{error.name}."):
            raise
        hint = f": run `{install_hint(extra, package)}`" if extra else " with this sparsetir"
        raise ImportError(
            f"{caller}: needs {title or package}, which is not installed{hint}"
        ) from error


def extend(package: str, **modules: str) -> Callable[[str], NoReturn]:
    """Add the names of extensions to a package, and return its `__getattr__` for absent ones.

    modules : the names that each module of the package has, separated by spaces
    """
    absent = {}
    for module, names in modules.items():
        where = f"{package}.{module}"
        if find_spec(where) is None:
            absent |= dict.fromkeys(names.split(), where)
            continue
        for name in names.split():
            setattr(sys.modules[package], name, getattr(import_module(where), name))

    def refuse(name: str) -> NoReturn:
        if name in absent:
            need(f"{package}.{name}", absent[name])
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return refuse


def install_hint(extra: str, package: str) -> str:
    """The command that installs all packages of an extra of sparsetir, if it includes `package`.

    It names the packages themselves: pip would look for `sparsetir[extra]` in an index, which may
    lack the running version, such as a checkout's.
    """
    requirements = list(_requirements(extra)) or [package]
    return "pip install " + " ".join(f"'{requirement}'" for requirement in requirements)


def _requirements(extra: str) -> Iterator[str]:
    """Requirements of an extra, such as "optuna>=4.2"; none if sparsetir is not installed."""
    try:
        every = metadata.requires("sparsetir") or []
    except metadata.PackageNotFoundError:
        return
    for text in every:
        requirement, _, condition = (part.strip() for part in text.partition(";"))
        if condition not in (f'extra == "{extra}"', f"extra == '{extra}'"):
            continue
        nested = re.fullmatch(r"sparsetir\[([\w,-]+)\]", requirement)
        for other in nested[1].split(",") if nested else ():
            yield from _requirements(other)
        if not nested:
            yield requirement
