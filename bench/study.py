"""`python -m bench study`: what papers say of schedules, measured or counted again."""

from __future__ import annotations

import argparse
import importlib

from bench.names import STUDIES

GIVEN = ("groups", "relations", "coarsen")
COUNTED = ("load-balance", "groups", "relations", "coarsen")


def run(args: argparse.Namespace) -> None:
    """The command."""
    if args.counts and args.study not in COUNTED:
        raise SystemExit(f"study {args.study}: --counts is of {' and '.join(COUNTED)}")
    if args.counts and args.full:
        raise SystemExit(
            f"study {args.study}: --counts is of small sizes, for each access is looked at; leave "
            "out --full"
        )
    if args.data and args.study not in GIVEN:
        raise SystemExit(
            f"study {args.study}: --data is of {' and '.join(GIVEN)}; the others make their "
            "matrices"
        )
    assert args.study in STUDIES
    module = args.study.replace("-", "_")
    importlib.import_module(f"bench.studies.{module}").run(args)
