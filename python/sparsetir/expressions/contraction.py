"""The order of contractions in products of several factors, by visits and memory.

One iteration over A[i, j] * B[j, k] * X[k, l] visits every pair of elements that meet, for each l;
B[j, k] * X[k, l] first makes two products of it. An index of a single factor, such as l in
A[i, j] * X[j, l], is summed over first. Sparse operands stay sparse only within an iteration:
intermediate results are dense, and counted as such. Elements are taken to lie anywhere, so that
what visits two sparse operands in turn costs more than is counted, where rows differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import combinations, count
from math import prod

from sparsetir.expressions.assignments import Assignment, Term
from sparsetir.expressions.trees import Access, Affine, Call, Tree, accesses, indices_of, walk

# Visits of dense operands alone that take as long as one of a sparse operand; 3 to 10, as measured.
LANES = 4


def contracted(
    steps: Sequence[Assignment], sizes: Mapping[object, int], stored: Mapping[str, int], most: float
) -> tuple[Assignment, ...]:
    """Split products into steps, if that is less work.

    sizes : size of each index
    stored : number of elements of each sparse operand
    most : factors up to which all orders are tried; beyond, the best pair is taken each time
    """
    out: list[Assignment] = []
    names = fresh_names(steps)
    for step in steps:
        kept = [n for n in step.result.plain if n]
        work = Work(sizes, stored, kept, (step.like,) if step.like else (), most, LANES)
        terms: list[Term] = []
        for term in step.terms:
            value = term.value
            negative = isinstance(value, Call) and value.op == "neg"
            if isinstance(value, Call) and value.op == "neg":
                value = value.args[0]
            factors = factors_of(value)
            plain = not any(isinstance(x, Call) and x.as_product for x in walk(term.value))
            if step.op != "sum" or not plain:
                terms.append(term)
                continue
            begun = len(out)
            for n, factor in enumerate(factors):
                result = work.alone(factors, n)
                if result is not None:
                    result = replace(result, name=next(names))
                    over = tuple(i for i in indices_of(factor) if i not in result.plain)
                    out.append(Assignment(result, "sum", (Term(factor, over),)))
                    factors[n] = result
            _, order = work.best(factors)
            if not order and len(out) == begun:
                terms.append(term)
                continue
            for pair in order:
                first, second, rest, result = work.between(factors, pair, next(names))
                over = tuple(n for n in _indices([first, second]) if n not in result.plain)
                product = Call("*", (first, second))
                out.append(Assignment(result, "sum", (Term(product, over),)))
                factors = [*rest, result]
            value = reduce(lambda x, y: Call("*", (x, y)), factors)
            absent = [n for n in term.over if n not in indices_of(term.value)]
            over = tuple(n for n in [*indices_of(value), *absent] if n not in kept)
            terms.append(Term(Call("neg", (value,)) if negative else value, over))
        out.append(replace(step, terms=tuple(terms)))
    return tuple(out)


def may_be_contracted(steps: Sequence[Assignment]) -> bool:
    """Whether a product has more than two factors, or a factor indices of its own, so that
    :func:`contracted` may split it for some sizes."""
    for step in steps:
        for term in step.terms:
            factors = factors_of(term.value)
            each = [*step.result.plain, *(n for x in factors for n in indices_of(x))]
            if len(factors) > 2 or any(each.count(n) == 1 for n in _indices(factors)):
                return True
    return False


def fresh_names(steps: Sequence[Assignment]) -> Iterator[str]:
    """Names for further results."""
    taken = {x.name for s in steps for t in s.terms for x in accesses(t.value)}
    taken |= {s.result.name for s in steps}
    return (name for n in count() if (name := f"T{n}") not in taken)


class Work:
    """The number of visits of iterations, for the sizes of a term.

    kept : the indices of the result
    mask : accesses that bound the last iteration besides its factors
    most : factors up to which all orders are tried
    lanes : visits of dense operands that take as long as one of a sparse operand
    """

    def __init__(
        self, sizes: Mapping[object, int], stored: Mapping[str, int], kept: Sequence[str],
        mask: tuple[Access, ...], most: float = 0, lanes: int = 1,
    ) -> None:  # fmt: skip
        self.sizes, self.stored, self.kept, self.mask = sizes, stored, set(kept), mask
        self.most, self.lanes = most, lanes
        self.last = {*kept[-1:]} if len(kept) > 1 else set[str]()

    def of(
        self, factors: Sequence[Tree], result: Sequence[str], mask: Sequence[Access] = ()
    ) -> float:
        """The number of visits of one iteration over a product."""
        names = {*_indices(factors), *result}
        visits = float(prod(self.sizes[n] for n in names))
        sparse = {x for f in [*factors, *mask] for x in accesses(f) if x.name in self.stored}
        if not sparse:
            return visits / self.lanes
        for x in sparse:
            space = prod(self.sizes[n or (x.name, d)] for d, n in enumerate(x.plain))
            visits *= self.stored[x.name] / max(1, space)
        return visits

    def between(
        self, factors: Sequence[Tree], pair: Sequence[int], name: str = ""
    ) -> tuple[Tree, Tree, list[Tree], Access]:
        """Two factors, the others, and the result of the two, with the indices still needed."""
        first, second = (factors[n] for n in pair)
        rest = [x for n, x in enumerate(factors) if n not in pair]
        return first, second, rest, self._result([first, second], rest, name)

    def alone(self, factors: Sequence[Tree], n: int) -> Access | None:
        """The sum of a factor over the indices that no other has; None if it is no less work."""
        factor, rest = factors[n], [*factors[:n], *factors[n + 1 :]]
        result = self._result([factor], rest, "")
        shifted = any(None in x.plain for x in accesses(factor))
        if shifted or len(result.plain) == len(indices_of(factor)):
            return None
        least, _ = self.best(factors)
        later, _ = self.best([*rest, result])
        return result if self.of([factor], []) + self._size(result) + later < least else None

    def _result(self, factors: Sequence[Tree], rest: Sequence[Tree], name: str) -> Access:
        """The product of factors, with the indices that the rest or the result need."""
        wanted = {*_indices(rest), *self.kept}
        names = [n for n in _indices(factors) if n in wanted]
        read = [x for f in [*factors, *rest] for x in accesses(f) if x.name not in self.stored]
        features = {x.plain[-1] for x in read if len(x.plain) > 1} | self.last
        names.sort(key=lambda n: n in features)  # contiguous, as in the operands and the result
        return Access(name, tuple(Affine(((n, 1),)) for n in names))

    def _size(self, result: Access) -> float:
        """The cost of writing and reading a result."""
        return 2 * float(prod(self.sizes[n] for n in result.plain if n))

    def best(self, factors: Sequence[Tree]) -> tuple[float, list[tuple[int, int]]]:
        """The least work, and the pairs to contract before the rest: positions among the factors,
        where each step appends its result to the others."""
        least: float = self.of(factors, [*self.kept], self.mask)
        order: list[tuple[int, int]] = []
        if len(factors) < 3:
            return least, order
        tried: list[tuple[float, tuple[int, int]]] = []
        for pair in combinations(range(len(factors)), 2):
            first, second, _, result = self.between(factors, pair)
            tried.append((self.of([first, second], []) + self._size(result), pair))
        for cost, pair in sorted(tried)[: None if len(factors) <= self.most else 1]:
            if cost < least:
                _, _, rest, result = self.between(factors, pair)
                more, later = self.best([*rest, result])
                if cost + more < least:
                    least, order = cost + more, [pair, *later]
        return least, order


def factors_of(tree: Tree) -> list[Tree]:
    """The factors of a tree; numbers and scalars are merged with another factor."""
    if not isinstance(tree, Call) or tree.op != "*":
        return [tree]
    factors = factors_of(tree.args[0]) + factors_of(tree.args[1])
    alone = [x for x in factors if not indices_of(x)]
    if not alone or len(alone) == len(factors):
        return factors
    others = [x for x in factors if indices_of(x)]
    return [reduce(lambda x, y: Call("*", (x, y)), [*alone, others[0]]), *others[1:]]


def _indices(factors: Sequence[Tree]) -> list[str]:
    return list(dict.fromkeys(n for x in factors for n in indices_of(x)))
