"""Results, arguments and what a prelude keeps share memory as under torch's "aot_eager"."""

import pytest
import torch

NODES, EDGES = 7, 6


def flip(x):
    return x.logical_not_() if x.dtype == torch.bool else x.neg_()


def written_after_a_break(e):
    out = e.clone()
    view = out[:, 1:]
    torch._dynamo.graph_break()
    flip(view)
    return out


def written_twice(e):
    out = e.clone()
    row = out[0]
    torch._dynamo.graph_break()
    flip(row)
    part = row[1:]
    torch._dynamo.graph_break()
    flip(part)
    return out, row, part


def cumulative(e):
    """Sums are written to a part of new memory, as in PyG's `cumsum`."""
    out = torch.zeros(2, e.shape[1] + 1, dtype=torch.int64)
    torch.cumsum(e != 0, 1, out=out.narrow(1, 1, e.shape[1]))
    return out


def views_of_views(e):
    row = e.clone()[0]
    return row[2:][::2], row[2:], e[1][1:]


def strided(e):
    out = torch.empty_strided((2, e.shape[1]), (1, 2), dtype=e.dtype).copy_(e)
    return out, out.t(), e.t().clone(), e.t().contiguous()


def assigned(e):
    out = e.clone()
    out[0] = out[1]
    return out, out[0], flip(out[1])


def masked(e):
    kept = e[:, e[0] == e[1]]
    return kept[0], kept[1], kept, kept.unbind(0)


def resized(e):
    return e.detach().clone().resize_(e.shape[1] // 2, 2)


def views_of_copy(e):
    """Views of one copy, by operators of all kinds."""
    out = e.clone()
    return [
        out, out, out.t(), out[:, 1:], *out.unbind(0), *out.chunk(2, 1), out.diagonal(), out[:, :0],
        out.reshape(-1), out.unsqueeze(0), out[0].expand(3, -1), out.movedim(0, 1)[1:],
        out.as_strided((2, out.shape[1] // 3), (1, 2), 1), out.detach(), out.view_as(out), out.mT,
    ]  # fmt: skip


def several(e):
    """Equal operators of several results, which torch itself merges where it takes gradients."""
    one = e[0].sort()
    other = one if e.requires_grad else e[0].sort()
    return one.values[1:], one, other, e.max(0)


CASES = [
    written_after_a_break, written_twice, cumulative, views_of_views, strided, assigned, masked,
    resized, views_of_copy,
    lambda e: (e.clone(), e.clone(), e + 0 if e.dtype != torch.bool else ~e, e == e[:1]),
    lambda e: (e, e, e[0], e[0], e.view_as(e), e.t(), e.new_empty(0), e[:, 1:].t()),
    lambda e: e.as_strided((2, e.shape[1] // 3), (1, 2), e.storage_offset()),
    lambda e: (flip(e), e.clone(), e),
    lambda e: (flip(e[0]), e),
    lambda e: flip(e.t()[1:]),
    several,
]  # fmt: skip


def flat(results):
    if isinstance(results, torch.Tensor):
        return [results]
    return [x for each in results for x in flat(each)]


def state(tensors):
    """The aliases of tensors: which share memory, how each is laid out, and the values."""
    storages = {}
    for x in tensors:
        storage = storages.setdefault(x.untyped_storage()._cdata, len(storages))
        layout = (x.stride(), x.storage_offset()) if x.numel() else ()
        yield storage, x.dtype, x.shape, layout, x.requires_grad, x.detach().tolist()


def arguments(dtype, layout):
    generator = torch.Generator().manual_seed(3)
    index = torch.randint(0, NODES, (2, EDGES), generator=generator)
    attributes = index % 2 == 0 if dtype == torch.bool else index.to(dtype)
    if layout == "transposed":
        return index, attributes.t().contiguous().t()
    if layout == "sliced":
        return index, torch.cat([attributes, attributes], 1)[:, 3 : 3 + EDGES]
    return index, attributes[:, : 0 if layout == "empty" else EDGES].clone()


def steps(backend, cases, dtype, layout, grad, inference):
    """Observations of two calls, between which all results are written to."""
    torch._dynamo.reset()

    def model(x, index, attributes):
        computed = [(index + n).to(dtype) for n in range(len(cases))]
        learnt = [(x[:2, :EDGES] * (n + 1)).to(dtype) for n in range(len(cases))]
        sources = [attributes, computed, learnt] if attributes[0].shape[1] else [attributes]
        results = [[case(e) for case, e in zip(cases, s, strict=True)] for s in sources]
        return results, torch.zeros_like(x).index_add(0, index[1], x[index[0]])

    call = torch.compile(model, backend=backend)
    index = arguments(dtype, layout)[0]
    inputs = [arguments(dtype, layout)[1] for _ in cases]
    for _ in range(2):
        x = torch.linspace(-1, 1, NODES * 8).view(NODES, 8).requires_grad_(grad)
        with torch.inference_mode(inference):
            results, out = call(x, index, inputs)
        if grad:
            out.sum().backward()
        for written in (False, True):
            for n, e in enumerate(inputs):
                tensors = flat([e, *(r[n] for r in results)])
                with torch.inference_mode(inference), torch.no_grad():
                    for tensor in tensors[1:] if written else []:
                        if tensor.numel() and 0 not in tensor.stride():
                            flip(tensor)
                yield n, list(state(tensors))
        yield -1, list(state([index, out, *([x.grad] if grad else [])]))


TYPES = [torch.int64, torch.float32, torch.bool, torch.int32, torch.float64]
WAYS = [("plain", False, False), ("transposed", True, False), ("sliced", False, True),
        ("empty", True, False)]  # fmt: skip
DEFAULT = {(torch.int64, "transposed"), (torch.float32, "plain")}
ALL = [
    pytest.param(t, *way, marks=[] if (t, way[0]) in DEFAULT else pytest.mark.slow)
    for t in TYPES for way in WAYS
]  # fmt: skip


@pytest.mark.parametrize("dtype, layout, grad, inference", ALL)
@pytest.mark.slow
def test_aliases(dtype, layout, grad, inference, plain):
    for cases in (CASES[:2], CASES[2:]):
        how = cases, dtype, layout, grad, inference
        both = list(steps("sparsetir", *how)), list(steps("aot_eager", *how))
        for (n, result), (_, wanted) in zip(*both, strict=True):
            assert result == wanted, cases[n]
