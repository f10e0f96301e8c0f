"""Random expressions: several terms, products, functions, formats and results, beside NumPy's."""

import numpy as np
import torch
from hypothesis import assume
from hypothesis import strategies as st
from reference import reference
from test_einsum import array

import sparsetir
from drawing import examples
from sparsetir import SparseTensor, einsum
from sparsetir.expressions.checks import check_sums
from sparsetir.expressions.notation import parse
from sparsetir.expressions.trees import NotationError

FORMATS = {
    1: (None, "csf"),
    2: (None, "csr", "csc", "dcsr", "dcsc", "coo", "ell", "csf_1_0"),
    3: (None, "csf", "csf_2_0_1", "dcsf"),
    4: (None, "csf", "csf_1_0_3_2"),
}
RESULTS = {
    1: ("csf", "coo"), 2: ("csr", "csr", "csc", "dcsr", "coo"), 3: ("csf", "dcsf", "coo")
}  # fmt: skip
# The last one has no derivative at zero.
FUNCTIONS = (
    "relu({})",
    "tanh({})",
    "abs({})",
    "sigmoid({})",
    "exp({})",
    "({}) ** 2",
    "sqrt(abs({}))",
)


@st.composite
def expressions(draw, functions=FUNCTIONS):
    """A text, its operands dense and as given, and options."""
    sizes = {n: draw(st.integers(1, 4)) for n in "ijkl"}
    count = draw(st.integers(1, 4))
    names = "ABDE"[:count]
    accesses, dense, operands, formats = [], {}, {}, {}
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    case = draw(st.sampled_from(["some", "some", "empty", "one row", "one column"]))
    for name in names:
        rank = draw(st.sampled_from([1, 2, 2, 2, 3, 4]))
        index = draw(st.permutations("ijkl"))[:rank]
        sparse = draw(st.booleans())
        shape = tuple(sizes[n] for n in index)
        dense[name], operands[name] = array(shape, case, rng, sparse)
        format = draw(st.sampled_from(FORMATS[rank])) if sparse else None
        if format:
            formats[name] = format
        accesses.append(f"{name}[{','.join(index)}]")
    parts, free = [], set()
    for access in accesses:
        wrapped = draw(st.sampled_from(["{}"] * 12 + ["2 * {}", "-{}", "(1 + {})", *functions]))
        index = access[2:-1].split(",")
        # Of stored elements alone it is another product than NumPy's.
        if operands[access[0]] is dense[access[0]] and draw(st.integers(0, 9)) == 0:
            wrapped = f"prod({index.pop()}, {wrapped})"
        free |= {*index}
        parts.append(wrapped.format(access))
    text = parts[0]
    for part in parts[1:]:
        op = draw(st.sampled_from(["*"] * 6 + ["+"] * 2 + ["-"] * 2 + ["maximum"]))
        text = f"maximum({text}, {part})" if op == "maximum" else f"{text} {op} {part}"
        if op in "+-" and draw(st.integers(0, 3)) == 0:
            text = f"({text})"
    if draw(st.integers(0, 5)) == 0:
        text = draw(st.sampled_from(FUNCTIONS[:4])).format(text)
    out = draw(st.permutations(sorted(free)))[: draw(st.integers(0, min(3, len(free))))]
    left = f"C[{','.join(out)}]" if out else "C"
    options = {}
    masks = [a for a in accesses if a[0] in operands and isinstance(operands[a[0]], SparseTensor)]
    kind = draw(st.sampled_from(["dense"] * 3 + ["like", "sparse"]))
    if kind == "like" and masks:
        mask = draw(st.sampled_from(masks))
        left, options = f"C[{mask[2:-1]}]", {"like": mask[0]}
    elif kind == "sparse" and out:
        options = {"format": draw(st.sampled_from(RESULTS[len(out)]))}
    try:
        check_sums("", parse(f"{left} = {text}"))
    except NotationError:  # what is summed has to be said
        text = f"sum({', '.join(sorted(free - {*left[2:-1].split(',')}))}, {text})"
    return f"{left} = {text}", dense, operands, options, formats


def dense_of(result):
    if isinstance(result, SparseTensor):
        out = np.zeros(result.shape, result.dtype)
        out[tuple(result.pattern.coords)] = result.values
        return out
    return result


@examples(10, 3000, drawn=expressions())
def test_random_expressions(drawn):
    """Numbers are those of NumPy, at the pattern where the result has one."""
    text, dense, operands, options, formats = drawn
    want = reference(text, dense)
    try:
        result = einsum(text, **operands, **options, formats=formats)
    except ValueError as error:
        assume("coo" not in formats.values())  # coordinates that repeat are not searched
        raise error
    if "like" in options:
        want = np.where(dense[options["like"]] != 0, want, 0)
    np.testing.assert_allclose(
        dense_of(result), want, rtol=1e-8, atol=1e-8, err_msg=f"{text} {formats}"
    )


@examples(3, 300, drawn=expressions(FUNCTIONS[:-1]))
def test_random_gradients(drawn):
    """Gradients for all operands are those of finite differences."""
    text, dense, inputs, options, formats = drawn
    leaves = {n: torch.from_numpy(x.copy()).requires_grad_() for n, x in dense.items()}
    tensors = {
        n: leaves[n] if not isinstance(inputs[n], SparseTensor) else _sparse(inputs[n], leaves[n])
        for n in inputs
    }
    try:
        result = einsum(text, **tensors, **options, formats=formats).to_dense()
    except ValueError as error:
        assume("coo" not in formats.values())
        raise error
    weights = np.random.default_rng(0).standard_normal(tuple(result.shape))
    if "like" in options:
        weights *= dense[options["like"]] != 0
    (result * torch.from_numpy(weights)).sum().backward()
    for name, leaf in leaves.items():
        step = np.random.default_rng(1).standard_normal(leaf.shape) * (dense[name] != 0) * 1e-6
        more, less = ({**dense, name: dense[name] + s * step} for s in (1, -1))
        change = ((reference(text, more) - reference(text, less)) * weights).sum() / 2
        grad = np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy()
        np.testing.assert_allclose((grad * step).sum(), change, rtol=1e-3, atol=1e-10, err_msg=text)


@st.composite
def products(draw):
    """A matrix with stored zeros, its pattern, a vector, and whether the result is a matrix too."""
    m, n = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    number = st.sampled_from([0.0, 0.0, 1.0, -2.0, 0.5, 3.0])
    values = np.array(draw(st.lists(number, min_size=m * n, max_size=m * n))).reshape(m, n)
    stored = draw(st.lists(st.sampled_from([True, True, False]), min_size=m * n, max_size=m * n))
    x = np.array(draw(st.lists(number, min_size=n, max_size=n)))
    return values, np.array(stored).reshape(m, n), x, draw(st.sampled_from(["dense", "csr", "csc"]))


@examples(5, 1000, drawn=products())
def test_gradients_of_products_with_zeros_are_those_of_torch(drawn):
    """Of first and second order: with one zero in a row, the first is that of this element alone,
    and with two there is none; elements that are not stored have no part."""
    values, stored, x, format = drawn
    pattern = torch.from_numpy(stored)
    format = {} if format == "dense" else {"A": format}
    plan = None
    if format:
        at = SparseTensor(np.nonzero(stored), np.ones(stored.sum()), shape=stored.shape)
        dense = torch.ones(len(x), dtype=torch.float64)
        plan = sparsetir.plan("y[i] = prod(j, A[i,j] * x[j])", A=at, x=dense, formats=format)

    def ours(a, x):
        if plan is None:
            return einsum("y[i] = prod(j, A[i,j] * x[j])", A=a, x=x)
        return plan(A=a[pattern], x=x)

    def theirs(a, x):
        return torch.where(pattern | (not format), a * x, 1.0).prod(1)

    results = []
    for function in (ours, theirs):
        leaves = [torch.from_numpy(v.copy()).requires_grad_() for v in (values, x)]
        y = function(*leaves)
        first = torch.autograd.grad(
            (y * torch.arange(1, len(y) + 1)).sum(), leaves, create_graph=True
        )
        total = sum((g * torch.arange(1, g.numel() + 1).reshape(g.shape)).sum() for g in first)
        results.append([y, *first, *torch.autograd.grad(total, leaves)])
    for got, want in zip(*results):
        torch.testing.assert_close(got, want)


def _sparse(pattern, leaf):
    """A sparse tensor of torch with the values of a dense one."""
    index = torch.from_numpy(np.stack(pattern.pattern.coords).astype("int64"))
    return torch.sparse_coo_tensor(index, leaf[tuple(index)], leaf.shape, is_coalesced=True)
