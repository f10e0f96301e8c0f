"""Divisions and functions computed once for the indices they depend on, instead of in each visit.

In `p[i] = A[i, j] * x[j] / d[j]` the quotient x[j] / d[j] is a step of its own where the elements
of A are many more than the j; in `C[i, k] = A[i, j] * X[j, k] / d[j]` a division belongs to an
element of A, and not to each k. Products are reassociated, as they are by contractions. (Zen 5, one
thread, four graphs and matrices: 1.0 to 1.7 times as fast with a division, 2.3 and more with exp.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce

from sparsetir.expressions.assignments import Assignment, Term
from sparsetir.expressions.contraction import Work, fresh_names
from sparsetir.expressions.notation import FUNCTIONS
from sparsetir.expressions.trees import (
    Access,
    Affine,
    Call,
    Number,
    Tree,
    accesses,
    indices_of,
    replaced,
    walk,
)

COSTLY = {"/", "**", *FUNCTIONS} - {"floor", "ceil"}
# The cost of writing and reading a result of a step, in divisions.
COST_OF_KEEPING = 2


def hoisted(
    steps: Sequence[Assignment], sizes: Mapping[object, int], stored: Mapping[str, int]
) -> tuple[Assignment, ...]:
    """Give costly parts of terms that only read dense operands steps of their own, where that
    computes them less often.

    sizes : size of each index
    stored : number of elements of each sparse operand
    """
    names, out = fresh_names(steps), []
    for step in steps:
        terms: list[Term] = []
        for term in step.terms:
            of_term = _Term(step, term, sizes, stored, names)
            terms.append(of_term.rewritten())
            out += of_term.steps
        out.append(replace(step, terms=tuple(terms)))
    return tuple(out)


def may_be_hoisted(steps: Sequence[Assignment]) -> bool:
    """Whether terms have costly parts, which :func:`hoisted` looks for."""
    return any(_is_costly(x) for s in steps for t in s.terms for x in walk(t.value))


class _Term:
    """A term, with the steps that compute its parts.

    visits : those of the term's iteration
    """

    def __init__(
        self, step: Assignment, term: Term, sizes: Mapping[object, int],
        stored: Mapping[str, int], names: Iterator[str],
    ) -> None:  # fmt: skip
        self.term, self.names, self.steps = term, names, list[Assignment]()
        self.work = Work(sizes, stored, [], (step.like,) if step.like else ())
        kept = [n for n in step.result.plain if n]
        self.visits = self.work.of([term.value], kept, self.work.mask)

    def rewritten(self) -> Term:
        """The term that reads the results of the steps."""
        value = replaced(self._with_near_divisors(self.term.value), self._kept)
        return replace(self.term, value=value)

    def _kept(self, tree: Tree) -> Tree | None:
        """The result of a new step that computes a costly part; None if that takes longer."""
        names, costly = indices_of(tree), any(_is_costly(x) for x in walk(tree))
        if not (names and costly and self._is_dense(tree)):
            return None
        if self._cost(tree, True) > self.visits:
            return None
        result = Access(next(self.names), tuple(Affine(((n, 1),)) for n in names))
        self.steps.append(Assignment(result, "sum", (Term(tree, ()),)))
        return result

    def _is_dense(self, tree: Tree) -> bool:
        """Whether a part reads dense operands only, at indices themselves."""
        return all(x.name not in self.work.stored and None not in x.plain for x in accesses(tree))

    def _cost(self, tree: Tree, kept: bool) -> float:
        return self.work.of([tree], []) * (1 + COST_OF_KEEPING * kept)

    def _with_near_divisors(self, tree: Tree) -> Tree:
        """The product with each divisor under the factor for which it divides least often."""
        factors, divisors = _quotient(tree)
        if not divisors or len(factors) < 2:
            return tree
        for divisor in divisors:
            costs: list[float] = []
            for factor in factors:
                pair = Call("/", (factor, divisor))
                costs.append(min(self.visits, self._cost(pair, self._is_dense(pair))))
            place = len(costs) - 1 - costs[::-1].index(min(costs))
            factors[place] = Call("/", (factors[place], divisor))
        return reduce(lambda x, y: Call("*", (x, y)), factors)


def _is_costly(tree: Tree) -> bool:
    return isinstance(tree, Call) and tree.op in COSTLY


def _quotient(tree: Tree) -> tuple[list[Tree], list[Tree]]:
    """The factors of a product, and its divisors."""
    if isinstance(tree, Call) and not tree.as_product and tree.op in ("*", "/"):
        first, under_first = _quotient(tree.args[0])
        if tree.op == "/":
            return first, [*under_first, tree.args[1]]
        second, under_second = _quotient(tree.args[1])
        return first + second, under_first + under_second
    if isinstance(tree, Call) and tree.op == "neg":
        factors, divisors = _quotient(tree.args[0])
        return [Number(-1), *factors], divisors
    return [tree], []
