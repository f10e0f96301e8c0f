"""The command `sparsetir`: tune, bench, lower, formats, records, doctor.

Results go to stdout, progress and errors to stderr. What a command needs is imported when it runs.
"""

from __future__ import annotations

import os
import re
import sys
import traceback

from sparsetir.cli import doctor, formats, lower, records, tune
from sparsetir.cli.arguments import Parser, UsageError

__all__ = ["main", "parser"]

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
EPILOG = """\
examples:
  sparsetir tune spmm --graph cora --feat 32 128
  sparsetir formats graph.mtx --picture graph.png
  sparsetir lower sddmm --stage 3
  sparsetir doctor

`sparsetir COMMAND --help` tells more about each. Exit codes: 0 all went well, 1 the work failed,
2 an argument is wrong, 130 stopped by Ctrl-C.
"""
# Functions of the package begin their errors with their names.
NAMES = re.compile(r"^(?:tune|plan|build|compare|resolve_target): ")
# Errors whose texts are not written for people.
UNEXPECTED = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError)


def parser() -> Parser:
    """Of all commands."""
    out = Parser(
        prog="sparsetir", description="Compile and tune sparse operators for graphs.", epilog=EPILOG
    )
    out.add_argument("--version", action="version", version=f"sparsetir {_version()}")
    commands = out.add_subparsers(dest="command", metavar="COMMAND", required=True)
    tune.add(commands)
    # Its arguments are those of `python -m bench`, which `main` hands over.
    commands.add_parser(
        "bench", help="measure operators beside other libraries (in a checkout)", add_help=False
    )
    for module in (lower, formats, records, doctor):
        module.add(commands)
    return out


def main(words: list[str] | None = None) -> int:
    """Run the command line; the exit code."""
    words = sys.argv[1:] if words is None else words
    if words[:1] == ["bench"]:
        return _bench(words[1:])
    who, debug = "sparsetir", "--debug" in words
    try:
        args = parser().parse_args(words)
        who = f"sparsetir {args.command}"
        return args.run(args)
    except KeyboardInterrupt:
        print(f"{who}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Who read our output, such as `head`, has enough; nothing more can be flushed to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except UsageError as error:
        print(f"{error.prog or who}: {error}", file=sys.stderr)
        return USAGE
    except Exception as error:
        if debug:
            traceback.print_exc()
        print(f"{who}: {_line(error)}", file=sys.stderr)
        return USAGE if _refused(error) else FAILED


def _bench(words: list[str]) -> int:
    """`python -m bench` of the checkout that this package is in."""
    import importlib
    from pathlib import Path

    root = Path(__file__).resolve().parents[3]
    if not (root / "bench" / "__main__.py").is_file():
        print(
            "sparsetir bench: measurements are no part of the installed package: run "
            "`python -m bench` in a checkout of its sources",
            file=sys.stderr,
        )
        return FAILED
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    importlib.import_module("bench.__main__").main(words, run_as=("sparsetir", "bench"))
    return OK


def _refused(error: Exception) -> bool:
    """Whether a function did not take an argument, which is one of the command line here."""
    return isinstance(error, TypeError | ValueError) and " argument '" in str(error)[:30]


def _line(error: Exception) -> str:
    """What went wrong, in one line."""
    text = NAMES.sub("", (str(error).strip() or type(error).__name__).splitlines()[0])
    if isinstance(error, UNEXPECTED) and not _refused(error):
        return f"{type(error).__name__}: {text} (--debug shows where)"
    return text


def _version() -> str:
    from sparsetir import __version__

    return __version__
