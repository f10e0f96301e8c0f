"""A schedule that other processes can import: where its function is, and which text it has."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

EXPECTED = "expected a function (sch, config) at the top level of a file, which workers can import"
PREFIX = "sparsetir_file_"  # of the names that modules of such files have
# Files that are being run for a function in them, by the modules' names.
_loading: list[str] = []


@dataclass(frozen=True)
class ScheduleRef:
    """A function at the top level of a file.

    module : to be imported by name; "" for a file that is no module of the path, or is a script
    file : its path; name : of the function in it
    """

    module: str
    file: str
    name: str

    @staticmethod
    def of(schedule: Callable[..., object]) -> ScheduleRef:
        """Where a function is; ValueError, TypeError where workers could not import it."""
        who = "tune: argument 'schedule'"
        if not callable(schedule):
            raise TypeError(f"{who}: {EXPECTED}, got {type(schedule).__name__}")
        name = getattr(schedule, "__qualname__", None)
        code = getattr(schedule, "__code__", None)
        if name is None or code is None:
            raise TypeError(f"{who}: {EXPECTED}, got an object of {type(schedule).__name__}")
        if "<lambda>" in name:
            raise ValueError(f"{who}: {EXPECTED}, got a lambda")
        if "." in name:
            raise ValueError(f"{who}: {EXPECTED}, got '{name}', which is made inside another")
        file = Path(code.co_filename)
        if not file.is_file():
            raise ValueError(f"{who}: {EXPECTED}, got '{name}' of {file}, which is no file")
        module = str(schedule.__module__)
        return ScheduleRef(
            module if _is_importable(module, file) else "", str(file.resolve()), name
        )

    def load(self) -> Callable[..., Any]:
        """The function."""
        module = importlib.import_module(self.module) if self.module else load_file(self.file)
        return getattr(module, self.name)

    def digest(self) -> str:
        """Hash of its name and the text of its file: another text is another schedule."""
        text = Path(self.file).read_bytes()
        return hashlib.blake2b(f"{self.name}\n".encode() + text, digest_size=16).hexdigest()

    def data(self) -> dict[str, str]:
        """For JSON."""
        return {"module": self.module, "file": self.file, "name": self.name}


def importing() -> bool:
    """Whether a file is being run for what it defines, so that it is not to begin any work."""
    return bool(_loading)


def load_file(file: Path | str) -> ModuleType:
    """A Python file, run as a module of its own; errors are those of its code."""
    file = Path(file)
    digest = hashlib.blake2b(str(file.resolve()).encode(), digest_size=4).hexdigest()
    name = f"{PREFIX}{file.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"expected a Python file, got '{file}'")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where Python looks for the source of its functions
    _loading.append(name)
    try:
        spec.loader.exec_module(module)
    finally:
        _loading.remove(name)
    return module


def _is_importable(module: str, file: Path) -> bool:
    """Whether another process that imports a module by name gets this file."""
    if module == "__main__" or module.startswith(PREFIX):
        return False
    parent = sys.modules.get(module.rpartition(".")[0])
    # Not `importlib.util.find_spec`, which knows what is loaded, however that was done.
    found = PathFinder.find_spec(module, getattr(parent, "__path__", None))
    return found is not None and found.origin is not None and Path(found.origin).samefile(file)
