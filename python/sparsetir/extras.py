"""Packages that only some functions need."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module, metadata

# Begins the code of a process that needs no torch: TVM, which would import it, then comes without.
WITHOUT_TORCH = "import sparsetir, sys; sys.modules['torch'] = None"


def allow_torch() -> None:
    """Let modules of the user's import torch after all, once TVM is loaded without it."""
    if sys.modules.get("torch", ...) is None:
        del sys.modules["torch"]


def need(who: str, package: str, extra: str, title: str = "") -> None:
    """Raise ImportError, with what to install, where a package is not installed.

    extra : of sparsetir, that brings it
    title : what people call it; by default as it is imported
    """
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ImportError(
            f"{who}: needs {title or package}, which is not installed: "
            f"run `{install_hint(extra, package)}`"
        ) from error


def install_hint(extra: str, package: str) -> str:
    """The command that installs a package which an extra of sparsetir brings, and all of the extra.

    It names the packages themselves: `sparsetir[extra]` would be looked for in an index, which may
    not have what runs here, such as a checkout.
    """
    found = list(_requirements(extra)) or [package]
    return "pip install " + " ".join(f"'{requirement}'" for requirement in found)


def _requirements(extra: str) -> Iterator[str]:
    """Requirements of an extra, such as "optuna>=4.2"; none where sparsetir is not installed."""
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
