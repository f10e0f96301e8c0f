"""Parts that commands share: errors, the parser, types of arguments."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

from sparsetir.reductions import REDUCTION_NAMES
from sparsetir.schedules.operators.names import DTYPES

if TYPE_CHECKING:
    import scipy.sparse as sp

    from sparsetir.data.sparse_tensor import SparseTensor
    from sparsetir.records.task import Config

T = TypeVar("T")
Facts: TypeAlias = dict[str, Any]  # for JSON
MOST = 2**31 - 1
OPTIONS = {"weighted": "unweighted"}  # options named differently than a function's argument
# Lexers of pygments, by the kind of a stage's text.
LEXERS = {"source": "LlvmLexer", "cuda": "CudaLexer", "asm": "GasLexer"}
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
FEAT = 32  # features of operators, unless --feat says so


class Failed(Exception):
    """Raised if a command fails; the message is for users."""


class UsageError(Exception):
    """Raised for an invalid argument; prog : the command, if it is not the running one."""

    def __init__(self, text: str, prog: str = "") -> None:
        super().__init__(text)
        self.prog = prog


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError with one line, where argparse prints the usage and exits."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        # An abbreviated option could change its meaning when a new option is added.
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Called by argparse."""
        raise UsageError(message + _meant(message), self.prog)


def _meant(message: str) -> str:
    """The choice most similar to an invalid one, as a question."""
    match = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message, re.DOTALL)
    if match is None:
        return ""
    near = get_close_matches(match[1], re.findall(r"[^\s',]+", match[2]), 1)
    return f"; did you mean {near[0]}?" if near else ""


def add_target(out: argparse._ActionsContainer) -> None:
    """Add the option for the target."""
    out.add_argument("--target", type=target, default="cpu", help="cpu (default), cuda or JSON")


def add_json(out: argparse._ActionsContainer) -> None:
    """Add the option for machine-readable output."""
    out.add_argument("--json", action="store_true", help="print one JSON document")


def add_modules(out: argparse._ActionsContainer) -> None:
    """Add the option for plug-ins, which :func:`import_modules` reads before all others."""
    text = "modules to import first: your own operators, formats, templates"
    out.add_argument("--modules", nargs="+", action="extend", metavar="NAME", help=text)


def import_modules(words: Sequence[str]) -> None:
    """Import the plug-ins of `--modules`, also from the current folder, like `python -m`."""
    early = Parser(add_help=False)
    add_modules(early)
    names = early.parse_known_args(list(words))[0].modules or []
    if names and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in names:
        try:
            import_module(name)
        except Exception as error:
            why = f"argument --modules: {name}: {type(error).__name__}: {error}"
            missing = isinstance(error, ImportError) and f"{name}.".startswith(f"{error.name}.")
            raise (UsageError if missing else Failed)(why) from error


def add_operator(out: argparse._ActionsContainer, graph: str, **feat: Any) -> None:
    """Add the options of an operator on a graph.

    graph : help of `--graph`; feat : settings of the option `--feat`
    """
    out.add_argument("--graph", help=graph)
    text = "feature sizes" if "nargs" in feat else "features"
    number(out, "--feat", 1, f"{text} (default: {FEAT})", **feat)
    out.add_argument("--dtype", choices=DTYPES, help="default: that of the graph, or float32")
    out.add_argument("--reduce", choices=REDUCTION_NAMES, help="default: sum")


def config_text(config: Mapping[str, object]) -> str:
    """A short text for a config, of its data."""
    try:
        from sparsetir.schedules.search.configs import from_data
        from sparsetir.tuning.report import short

        return short(from_data(config))
    except ValueError:  # of another version
        return str(config.get("template", config))


def refuse(options: Mapping[str, object], what: str) -> None:
    """Raise UsageError for the first option that has a value.

    what : what the options do not apply to
    """
    for name, value in options.items():
        if value is not None:
            option = OPTIONS.get(name, name.replace("_", "-"))
            raise UsageError(f"argument --{option}: expected none for {what}")


def add_command(
    commands: argparse._SubParsersAction[Parser], module: ModuleType, name: str, title: str
) -> Parser:
    """Add the parser of a command, with the options that all commands have.

    module : has the functions `run` and `add`, which adds arguments, and the text `EPILOG`
    """
    about = f"{title[0].upper()}{title[1:]}."
    out = commands.add_parser(name, help=title, description=about, epilog=module.EPILOG)
    module.add(out)
    add_modules(out)
    out.add_argument("--debug", action="store_true", help="show where an error comes from")
    out.set_defaults(run=module.run)
    return out


def graph(text: str, argument: str = "--graph") -> tuple[str, sp.csr_array]:
    """The name and matrix of an argument; UsageError if it is not a graph."""
    from sparsetir.data.graphs import load_graph

    return _loaded(load_graph, text, argument)


def relations(text: str, argument: str = "--graph") -> tuple[str, SparseTensor]:
    """The name and tensor, by (relation, target, source), of an argument; like :func:`graph`."""
    from sparsetir.data.graphs import load_relations

    return _loaded(load_relations, text, argument)


def _loaded(load: Callable[[str], T], text: str, argument: str) -> tuple[str, T]:
    from sparsetir.data.graphs import GraphError, graph_name

    try:
        return graph_name(text), load(text)
    except GraphError as error:
        raise UsageError(f"argument {argument}: {error}") from error


def at_least(least: float, kind: type = int, most: float = MOST) -> Callable[[str], object]:
    """An argument type for numbers from `least` to `most`, which only excludes absurd ones."""

    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            what = "an integer" if kind is int else "a number"
            over = value is not None and value > most
            span = f"from {least} to {most:,}" if over else f"of at least {least}"
            raise argparse.ArgumentTypeError(f"expected {what} {span}, got {text!r}")
        return value

    return convert


def number(
    out: argparse._ActionsContainer,
    name: str,
    least: float,
    text: str,
    kind: type = int,
    most: float = MOST,
    **more: Any,
) -> None:
    """Add an option for a number; text : its help, to which the default is added, if any."""
    told = f"{text} (default: {more['default']})" if "default" in more else text
    out.add_argument(name, type=at_least(least, kind, most), help=told, **more)


def size(text: str) -> int:
    """Parse a number of bytes, such as `512M` or `4G`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    value = float(match[1]) * UNITS[match[2].upper()] if match else 0
    if not 1 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"expected bytes, such as 512M or 4G, got {text!r}")
    return int(value)


def target(text: str) -> str | dict[str, object]:
    """Parse a target: `llvm`, `cuda`, or JSON such as `{"kind": "cuda", "arch": "sm_90"}`."""
    return mapping(text) if text.lstrip().startswith("{") else text


def config(text: str) -> Config:
    """Parse a config of a template from JSON."""
    from sparsetir.schedules.search.configs import from_data

    try:
        return from_data(mapping(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def named_values(texts: Sequence[str], argument: str = "--arg") -> dict[str, object]:
    """The numbers and arrays of texts `name=value`, by name; UsageError for other values.

    A value is a number, a .npy file, `file.npz:key`, or `file.npz` with the name as key.
    """
    out: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise UsageError(f"argument {argument}: expected NAME=VALUE, got {text!r}")
        if name in out:
            raise UsageError(f"argument {argument}: expected '{name}' once")
        out[name] = value_of(f"argument {argument}: {name}", name, value)
    return out


def value_of(caller: str, name: str, text: str) -> object:
    """Read a number or an array, see :func:`named_values`."""
    import numpy as np

    from sparsetir.runtime.file_errors import check_npz, reading

    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    file, _, key = text.partition(".npz:")
    path = Path(f"{file}.npz" if key else text)
    if path.suffix not in (".npy", ".npz"):
        raise UsageError(f"{caller}: expected a number, file.npy or file.npz:key, got {text!r}")
    with reading(f"{caller}: {path}", UsageError):
        if path.suffix == ".npz":
            check_npz(path)
        loaded = np.load(path, allow_pickle=False)
        if path.suffix == ".npy":
            return loaded
        with loaded:
            if (key or name) not in loaded.files:
                there = ", ".join(loaded.files)
                raise UsageError(f"{caller}: {path} has no '{key or name}', but {there}")
            return loaded[key or name]


def mapping(text: str) -> dict[str, object]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        shown = text if len(text) < 200 else f"{text[:200]}..."
        raise argparse.ArgumentTypeError(f"expected JSON, got {shown!r}: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value


def print_json(data: object) -> None:
    """Print the document of `--json`."""
    json.dump(data, sys.stdout, indent=1, allow_nan=False)
    print()


def coloured(text: str, kind: str = "") -> str:
    """Colour a text if it is printed on a terminal that supports it.

    kind : "source", "cuda" or "asm"; Python otherwise
    """
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    try:
        pygments = import_module("pygments")
        lexer = getattr(import_module("pygments.lexers"), LEXERS.get(kind, "PythonLexer"))()
        formatter = import_module("pygments.formatters").TerminalFormatter()
    except (ImportError, AttributeError):  # pygments is optional
        return text
    return pygments.highlight(text, lexer, formatter).rstrip("\n")
