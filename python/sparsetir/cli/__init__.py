"""The command `sparsetir`: tune, bench, lower, explain, formats, records, doctor.

Results go to stdout, progress and errors to stderr. Only the called command is imported, and its
dependencies when it runs.
"""

from __future__ import annotations

import io
import os
import re
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from sparsetir._versions import VERSION
from sparsetir.cli.arguments import Parser, UsageError, add_command, import_modules
from sparsetir.cli.expressions import add_operands
from sparsetir.cli.functions import check_program
from sparsetir.expressions.trees import NotationError
from sparsetir.extras import allow_torch
from sparsetir.runtime.file_errors import printable

__all__ = ["main", "parser"]

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
COMMANDS = {
    "tune": "search formats and schedules for an operator, an expression, or a function in a file",
    "bench": "compare operators with other libraries (in a checkout)",
    "lower": "print a stage of the program of an operator, an expression, or a function in a file",
    "explain": "show what the compiler did with one of these: loops, schedule, roofline",
    "formats": "show statistics of a graph, and its size in each format",
    "records": "list, export, import or forget results of tuning",
    "doctor": "show versions, targets, CPU, GPU, records; check that a kernel runs",
}
EPILOG = """\
examples:
  sparsetir tune spmm --graph cora --feat 32 128
  sparsetir formats graph.mtx --picture graph.png
  sparsetir lower sddmm --stage 3
  sparsetir explain spmm.py --graph cora --arg feat=64
  sparsetir explain "C[i,k] = A[i,j] * X[j,k]" --A cora --X 2708x64
  sparsetir doctor

See also `sparsetir COMMAND --help`. Exit codes: 0 success, 1 failure, 2 invalid argument, 130
stopped by Ctrl-C.
"""
OF_PROGRAMS = ("tune", "lower", "explain")
WITHOUT_TORCH = ("lower", "explain", "formats", "records")
# Functions of the package begin their errors with their names.
NAMES = re.compile(r"^(?:tune|plan|build|compare|resolve_target): ")
# Errors whose messages are not written for users.
UNEXPECTED = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError)


def parser(words: Sequence[str] = ()) -> Parser:
    """The parser of all commands, with the arguments of the command in `words`, if any."""
    out = Parser(
        prog="sparsetir", description="Compile and tune sparse operators for graphs.", epilog=EPILOG
    )
    out.add_argument("--version", action="version", version=f"sparsetir {VERSION}")
    commands = out.add_subparsers(dest="command", metavar="COMMAND", required=True)
    wanted = next((word for word in words if not word.startswith("-")), None)
    for name, title in COMMANDS.items():
        if name == wanted and name != "bench":
            command = add_command(commands, import_module(f"sparsetir.cli.{name}"), name, title)
            if name in OF_PROGRAMS:
                add_operands(command, words)
        else:  # `main` passes arguments of `bench` on to `python -m bench`
            commands.add_parser(name, help=title, add_help=False)
    return out


def main(words: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    _open_streams()
    try:
        try:
            return _run(sys.argv[1:] if words is None else words)
        finally:
            sys.stdout.flush()  # else Python would report a failure at its end
    except BrokenPipeError:
        # The reader, such as `head`, has closed our output, which can no longer be flushed.
        _drop_output()
        return OK
    except OSError as error:
        _drop_output()
        print(f"sparsetir: the output cannot be written: {error.strerror}", file=sys.stderr)
        return FAILED


def _open_streams() -> None:
    """Redirect closed streams to nowhere; make others escape characters they cannot encode."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(words: list[str]) -> int:
    if not words:
        parser().print_help()
        return OK
    if words[:1] == ["bench"]:
        return _bench(words[1:])
    name, debug = "sparsetir", "--debug" in words
    name += f" {words[0]}" if words[0] in COMMANDS else ""
    try:
        import_modules(words)
        args = parser(words).parse_args(words)
        if args.command in OF_PROGRAMS:
            check_program(args.program, messages=args.command == "tune")
        if args.command in WITHOUT_TORCH:
            _load_without_torch()
        return args.run(args)
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except UsageError as error:
        print(f"{error.prog or name}: {printable(str(error))}", file=sys.stderr)
        return USAGE
    except Exception as error:
        if debug:
            traceback.print_exc()
        print(f"{name}: {_line(error)}", file=sys.stderr)
        return USAGE if _refused(error) else FAILED


def _load_without_torch() -> None:
    """Load TVM without torch, whose import takes longer; modules of users may import it later."""
    if not {"torch", "tvm"} & sys.modules.keys():
        sys.modules["torch"] = None  # type: ignore[assignment]
        try:
            import_module("tvm")
        finally:
            allow_torch()


def _bench(words: list[str]) -> int:
    """Run `python -m bench` of the checkout that this package is in."""
    from pathlib import Path

    root = Path(__file__).resolve().parents[3]
    if not (root / "bench" / "__main__.py").is_file():
        print(
            "sparsetir bench: measurements are not part of the installed package: run "
            "`python -m bench` in a checkout of its sources",
            file=sys.stderr,
        )
        return FAILED
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    import_module("bench.__main__").main(words, run_as=("sparsetir", "bench"))
    return OK


def _refused(error: Exception) -> bool:
    """Whether a function refused an argument, which comes from the command line."""
    if isinstance(error, NotationError):
        return True
    return isinstance(error, TypeError | ValueError) and " argument '" in str(error)[:30]


def _line(error: Exception) -> str:
    """An error in one line; for an expression, with the position in its text."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    lines = lines if isinstance(error, NotationError) else lines[:1]
    text = NAMES.sub("", "\n".join(map(printable, lines)))
    if isinstance(error, UNEXPECTED) and not _refused(error):
        return f"{type(error).__name__}: {text} (--debug shows where)"
    return text
