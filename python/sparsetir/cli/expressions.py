"""Expressions as arguments of commands, with an option for each of their operands."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sparsetir.cli import arguments
from sparsetir.cli.arguments import Facts, Parser, UsageError

if TYPE_CHECKING:
    from sparsetir.sparse_ir.nodes import SparseFunc

OTHERS = "an expression, or file.py[:function]"
EPILOG = """\
An expression, "C[i,k] = A[i,j] * X[j,k]" or "ij,jk->ik" with operands A0 and A1, has an option for
each operand: a graph (with relations for three indices), 2708x64 for random numbers of this shape,
a number, or a .npy file. --dtype is the type of all but files. --like A gives the result the
pattern of an operand; --format csr, csf, coo, .. makes it sparse: `lower --stage 1` prints the
program that assembles it, all else uses the program at its pattern, which is computed first. Sparse
operands are stored like those of `sparsetir.einsum`, in CSR if that suits the expression; a format
before a colon overrides that: csc:cora, or coo, ell, dcsr, dcsc, csf, csf_1_0_2, dcsf.
"""
SHAPE = re.compile(r"\d+(x\d+)*")


def is_expression(text: str) -> bool:
    """Whether an argument OP|FILE is an expression, not JSON."""
    return "->" in text or ("[" in text and "=" in text and not text.startswith("{"))


def add_operands(out: Parser, words: Sequence[str]) -> None:
    """Add the options of the expression among the words of a command, if there is one.

    Raises UsageError for an operand with the name of another option, NotationError for an invalid
    expression.
    """
    text = next(filter(is_expression, words), None)
    if text is None:
        return
    from sparsetir.expressions.notation import parse, ranks_of

    group = out.add_argument_group("of the expression")
    group.add_argument("--like", metavar="NAME", help="the operand whose pattern the result has")
    group.add_argument("--format", metavar="NAME", help="format of a sparse result, such as csr")
    ranks = ranks_of(parse(text, "plan"))
    out.set_defaults(ranks=ranks)
    for name, rank in ranks.items():
        what = "a graph, or a shape such as 2708x64" if rank else "a number"
        try:
            group.add_argument(f"--{name}", dest=f"--{name}", required=True, metavar="X", help=what)
        except argparse.ArgumentError as error:
            raise UsageError(
                f"argument OP|FILE: expected another name for the operand '{name}', as --{name} is "
                "an option of the command"
            ) from error


def program_of(
    args: argparse.Namespace, text: str, refused: Mapping[str, object], at_pattern: bool = True
) -> tuple[SparseFunc, Facts, str | None]:
    """The program of an expression, its arguments, and the name of its first graph.

    refused : options that do not apply to expressions
    at_pattern : whether a sparse result is computed at its pattern; else the program assembles it
    """
    import ml_dtypes
    import numpy as np

    from sparsetir.data.sparse_tensor import SparseMatrix
    from sparsetir.expressions.einsum import einsum_program
    from sparsetir.expressions.storage import MATRICES

    arguments.refuse(refused, "an expression")
    dtype = np.dtype(ml_dtypes.bfloat16 if args.dtype == "bfloat16" else args.dtype or "float32")
    rng = np.random.default_rng(0)
    operands: dict[str, object] = {}
    formats: dict[str, str] = {}
    graphs: dict[str, tuple[str, object]] = {}  # options that name one graph share it
    for name, rank in args.ranks.items():
        option, source = f"--{name}", vars(args)[f"--{name}"]
        if SHAPE.fullmatch(source) and (rank or "x" in source):
            operands[name] = rng.random([int(n) for n in source.split("x")]).astype(dtype)
        elif not rank or source.endswith(".npy"):
            operands[name] = arguments.value_of(f"argument {option}", name, source)
        else:
            stored = re.fullmatch(rf"({'|'.join(MATRICES)}|d?csf(?:_\d)*):(.+)", source)
            if stored:
                formats[name], source = stored.groups()
            if source not in graphs:
                if rank == 3:
                    title, tensor = arguments.relations(source, option)
                else:
                    title, matrix = arguments.graph(source, option)
                    tensor = SparseMatrix(matrix)
                graphs[source] = title, tensor.astype(dtype)
            operands[name] = graphs[source][1]
    func, arrays = einsum_program(
        text, operands, like=args.like, format=args.format, formats=formats, at_pattern=at_pattern
    )
    return func, arrays, next((title for title, _ in graphs.values()), None)
