"""Pretended results of a search, for the tests of its report."""

import scipy.sparse as sp

from sparsetir import SparseMatrix
from sparsetir.formats import BSR, Hyb
from sparsetir.planning.plan import requested
from sparsetir.records.task import Outcome
from sparsetir.schedules.templates.decomposed import Decomposed
from sparsetir.schedules.templates.row_tile import RowTile
from sparsetir.tuning.tuned import Trial, Tuned

DEFAULT = RowTile(tile=128)
MESSAGE = "spmm <wrong> & 'bad': 3 of 40 wrong, the first at [0, 1]"


def matrix(m=60, n=50, seed=0):
    return SparseMatrix(
        sp.random_array((m, n), density=0.1, format="csr", dtype="float32", rng=seed)
    )


def task(op="spmm", feat=32, given=None, **options):
    return requested(op, matrix() if given is None else given, feat, **{"threads": 1, **options})


def outcome(seconds, padding=0.0, size=20_000, state="ok"):
    return Outcome(
        state, seconds, 1.1 * seconds, padding=padding, bytes=size, compile_seconds=0.3,
        convert_seconds=0.0001,
    )  # fmt: skip


def trials():
    """Ten right trials, two of which are of one config, one pruned, and three failures."""
    configs = [
        DEFAULT, RowTile(tile=64, pack=True, parts=2), Decomposed(Hyb(1, 3)),
        Decomposed(BSR(4, 4)),
        *(RowTile(tile=2**n, lanes=8, tiles_first=False) for n in range(3, 8)),
    ]  # fmt: skip
    times = [60e-6, 52e-6, 75e-6, 190e-6, 71e-6, 48e-6, 39e-6, 44e-6, 58e-6]
    outcomes = [outcome(t) for t in times]
    outcomes[2] = outcome(75e-6, padding=0.126, size=3 << 20)
    outcomes += [outcome(41e-6), outcome(900e-6, state="pruned")]
    configs += [configs[6], RowTile(tile=16, lanes=4)]
    for state, message in (
        ("wrong", MESSAGE), ("hung", "no answer for 60 s"), ("crashed", "killed by SIGSEGV"),
    ):  # fmt: skip
        configs.append(RowTile(tile=16, lanes=16, prefetch=len(configs)))
        outcomes.append(Outcome(state, message=message))
    return [Trial(n, c, o, 0.5 * n) for n, (c, o) in enumerate(zip(configs, outcomes, strict=True))]


def tuned(some=None, of=None, **more):
    of = task() if of is None else of
    some = trials() if some is None else some
    more = {"importances": {"template": 0.6, "RowTile.tile": 0.3, "RowTile.pack": 0.0}, **more}
    return Tuned(of, of.key(), some, DEFAULT, **more)
