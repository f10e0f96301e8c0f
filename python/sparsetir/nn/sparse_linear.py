"""Linear layers that store and compute with only the weights that pruning kept.

>>> import torch
>>> from sparsetir.nn import SparseLinear
>>> linear = torch.nn.Linear(64, 128)
>>> layer = SparseLinear.from_linear(linear, sparsity=0.9, block=(32, 32))
>>> layer
SparseLinear(in_features=64, out_features=128, bias=True, sparsity=0.88, block=(32, 32))
>>> x = torch.randn(2, 7, 64)
>>> y = torch.nn.functional.linear(x, layer.dense_weight(), layer.bias)
>>> torch.allclose(layer(x), y, atol=1e-5)
True
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.nn import LazyLinear, Linear, Module, Parameter
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.prune import BasePruningMethod

from sparsetir.ops.block_linear import block_linear
from sparsetir.ops.products import SPMM
from sparsetir.ops.tensors import check_tensor
from sparsetir.runtime.refusals import wrong


class SparseLinear(Module):
    """y = x W^T + b, where W is stored in dense blocks, or element by element.

    Make one with :meth:`from_linear`. Gradients of W are those of the stored elements, including
    stored zeros: pruned weights stay pruned.

    Parameters
    ----------
    weight : (out_features, in_features) Tensor
        W.
    mask : (out_features, in_features) Tensor, bool
        The elements to store.
    bias : (out_features,) Tensor or None
        b.
    block : (int, int) or None
        Rows and columns of a block.

    Attributes
    ----------
    values : (blocks, columns, rows of a block) or (nnz,) Parameter
        The stored values.
    indptr : (rows of blocks + 1,) or (out_features + 1,) Tensor, int32
        Row pointers.
    indices : (blocks,) or (nnz,) Tensor, int32
        Columns, of blocks or of elements.

    Notes
    -----
    With blocks, x and y keep torch's layout, and a block's values are multiplied with several
    tokens at a time. Element by element, x is transposed for the product, and y back, which takes
    about as long as a product at 95 %: prefer blocks where the model allows.
    """

    out_features: int
    in_features: int

    indptr: Tensor
    indices: Tensor

    def __init__(self, weight: Tensor, mask: Tensor, bias: Tensor | None, block: Any) -> None:
        """Store the elements of a dense weight that a mask selects; see :meth:`from_linear`."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.block: tuple[int, int] | None = None
        values = weight.detach()
        if block is None:
            rows, columns = mask.nonzero(as_tuple=True)
            values = values[rows, columns]
            height = self.out_features
        else:
            r, c = self.block = check_block("SparseLinear", weight, block)
            places = (self.out_features // r, r, self.in_features // c, c)
            kept = mask.reshape(places).any(3).any(1)
            rows, columns = kept.nonzero(as_tuple=True)
            values = values.reshape(places).permute(0, 2, 3, 1)[rows, columns].contiguous()
            height = places[0]
        counts = torch.bincount(rows, minlength=height)
        indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        self.register_buffer("indptr", indptr.to(torch.int32))
        self.register_buffer("indices", columns.to(torch.int32))
        self.values: Parameter = Parameter(values.clone())
        self.bias: Parameter | None = None if bias is None else Parameter(bias.detach().clone())

    @classmethod
    def from_linear(
        cls,
        linear: Linear,
        mask: Tensor | None = None,
        *,
        sparsity: float | None = None,
        threshold: float | None = None,
        block: tuple[int, int] | None = None,
    ) -> SparseLinear:
        """Make a sparse copy of a linear layer.

        Pass at most one of mask, sparsity and threshold; by default zero weights are pruned, or
        those outside the mask of `torch.nn.utils.prune`. The copy keeps `training`, the flags of
        parameters, hooks and other attributes; a layer with features that it cannot keep, such as
        parametrizations, is refused.

        Parameters
        ----------
        linear : torch.nn.Linear
            The layer.
        mask : (out_features, in_features) Tensor, bool, optional
            The weights to keep.
        sparsity : float, optional
            Share of the weights to prune, by magnitude (:func:`prune`).
        threshold : float, optional
            Keep weights of larger magnitude, and NaN.
        block : (int, int), optional
            Rows and columns of blocks, which must divide the weight's shape: a block is kept as a
            whole if one of its weights is.

        Returns
        -------
        SparseLinear
        """
        caller = "SparseLinear.from_linear"
        if not isinstance(linear, Linear):
            raise wrong(caller, "linear", "a torch.nn.Linear", type(linear).__name__, TypeError)
        if sum(x is not None for x in (mask, sparsity, threshold)) > 1:
            raise ValueError(
                f"{caller}: expected one of 'mask', 'sparsity' and 'threshold' at most, got several"
            )
        pruner = _pruner(linear)
        if lost := _lost(linear, pruner):
            raise wrong(
                caller, "linear", "a layer without parts that a sparse one cannot keep", lost
            )
        weight = (linear.weight if pruner is None else pruner.apply_mask(linear)).detach()
        if block is not None:
            check_block(caller, weight, block)
        if mask is not None and (mask.shape != weight.shape or mask.dtype != torch.bool):
            got = f"{str(mask.dtype).removeprefix('torch.')} of {tuple(mask.shape)}"
            raise wrong(caller, "mask", f"bool of shape {tuple(weight.shape)}", got)
        if threshold is not None and not threshold >= 0:
            raise wrong(caller, "threshold", "0 or more", repr(threshold))
        if sparsity is not None:
            mask = prune(weight, sparsity, block)
        elif mask is None:
            mask = torch.logical_not(weight.abs() <= (threshold or 0.0))  # NaN is kept
            if pruner is not None and threshold is None:
                mask = mask.logical_or(linear.get_buffer("weight_mask"))
        layer = cls(weight, mask, linear.bias, block)
        orig = "weight" if pruner is None else "weight_orig"
        layer.values.requires_grad_(linear.get_parameter(orig).requires_grad)
        if layer.bias is not None:
            layer.bias.requires_grad_(linear.bias.requires_grad)
        _keep(caller, layer, linear, {"weight", "bias", orig, orig.replace("orig", "mask")})
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer.

        Parameters
        ----------
        x : (..., in_features) Tensor
            Tokens.

        Returns
        -------
        (..., out_features) Tensor
        """
        if isinstance(x, Tensor) and x.is_nested:  # TransformerEncoder, in inference with padding
            return torch.nested.as_nested_tensor([self(part) for part in x.unbind()])
        if self.block is not None:
            return block_linear(
                x, self.values, self.indptr, self.indices, self.bias, self.out_features,
                self.in_features, False,
            )  # fmt: skip
        check_tensor("SparseLinear", "x", x, self.values, "the weights")
        if x.shape[-1:] != (self.in_features,):
            got = f"shape {tuple(x.shape)}"
            raise wrong("SparseLinear", "x", f"{self.in_features} features", got)
        flat = x.reshape(-1, self.in_features)
        out = SPMM(self.indptr, self.indices, self.values, flat.t().contiguous(), "sum")
        out = out if self.bias is None else out + self.bias[:, None]
        return out.t().contiguous().view(*x.shape[:-1], self.out_features)

    @property
    def weight(self) -> Any:
        """A stand-in for W, with which torch's functions refuse: see :meth:`dense_weight`.

        torch's transformers, which in inference read their layers' weights, call the layers then.
        """
        return _NO_WEIGHT

    def dense_weight(self) -> Tensor:
        """W as a dense matrix (out_features, in_features), without a gradient."""
        values = self.values.detach()
        rows = torch.repeat_interleave(self.indptr.diff())
        columns = self.indices.long()
        if self.block is None:
            out = values.new_zeros(self.out_features, self.in_features)
            out[rows, columns] = values
            return out
        r, c = self.block
        out = values.new_zeros(self.out_features // r, self.in_features // c, c, r)
        out[rows, columns] = values
        return out.permute(0, 3, 1, 2).reshape(self.out_features, self.in_features)

    @property
    def sparsity(self) -> float:
        """Share of the weights that are pruned."""
        return 1 - self.values.numel() / max(1, self.out_features * self.in_features)

    def extra_repr(self) -> str:
        """The layer's sizes and sparsity, for its representation."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, sparsity={self.sparsity:.2f}, block={self.block}"
        )


class _NoWeight:
    """The weight of a layer that has no dense one."""

    @classmethod
    def __torch_function__(cls, func: Any, *_: object) -> object:
        raise TypeError(
            f"{func.__name__}: expected a dense weight, got that of a SparseLinear, which stores "
            "those that pruning kept: call the layer, or take its dense_weight()"
        )


_NO_WEIGHT = _NoWeight()


def sparse_linears(
    model: Module, names: str | Callable[[str, Linear], bool] = "*", **how: Any
) -> list[str]:
    """Swap linear layers of a model for sparse ones, in place.

    Other modules are kept, including subclasses of `torch.nn.Linear`, and so are layers that share
    a parameter with another module, such as an output layer tied to an embedding. A layer that
    occurs several times is swapped for one. Without `sparsity` and `threshold` layers without zero
    weights are kept as well; if no other is left, that is an error. If
    :meth:`SparseLinear.from_linear` refuses one of the layers, none is swapped.

    Parameters
    ----------
    model : torch.nn.Module
        The model.
    names : str or callable
        A shell-style pattern of full names, such as "encoder.layer.*.dense", which must match a
        layer, or a function of a layer's name and the layer.
    **how
        `sparsity`, `threshold` and `block` of :meth:`SparseLinear.from_linear`.

    Returns
    -------
    list of str
        Names of the swapped layers.

    Examples
    --------
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> sparse_linears(model, "0", sparsity=0.5)
    ['0']
    """
    if "mask" in how:
        raise TypeError("sparse_linears: argument 'mask': expected none, as layers differ")
    chosen = (lambda name, _: fnmatchcase(name, names)) if isinstance(names, str) else names
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    known = {
        name: layer
        for name, layer in model.named_modules(remove_duplicate=False)
        if name and isinstance(layer, Linear)
        and (type(layer) in (Linear, LazyLinear) or is_parametrized(layer))
        and all(len(owners[id(x)]) == 1 for x in layer.parameters(recurse=False))
    }  # fmt: skip
    picked = {name: layer for name, layer in known.items() if chosen(name, layer)}
    if isinstance(names, str) and names != "*" and not picked:
        some = ", ".join(map(repr, list(known)[:4])) or "there are none"
        expected = f"a pattern of full names of layers to swap ({some}{', ..' * (len(known) > 4)})"
        raise wrong("sparse_linears", "names", expected, f"{names!r}, which matches none")
    if how.get("sparsity") is None and how.get("threshold") is None:
        whole = [name for name, layer in picked.items() if _is_whole(layer)]
        if whole and len(whole) == len(picked):
            expected = "weights that are zero, or 'sparsity' or 'threshold'"
            raise wrong("sparse_linears", "model", expected, f"none in {whole}")
        picked = {name: layer for name, layer in picked.items() if name not in whole}
    swapped: dict[Linear, SparseLinear] = {}
    for name, layer in picked.items():
        try:
            swapped[layer] = swapped.get(layer) or SparseLinear.from_linear(layer, **how)
        except ValueError as error:
            raise ValueError(f"sparse_linears: layer '{name}': {error}") from error
    for layer, sparse in swapped.items():
        _move_hooks(sparse, layer)
    for name, layer in picked.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, swapped[layer])
    return list(picked)


def _is_whole(linear: Linear) -> bool:
    """Whether none of a layer's weights is pruned, as far as can be determined."""
    unknown = (is_lazy(x) or x.is_meta for x in linear.parameters(recurse=False))
    computed = is_parametrized(linear) or any(unknown)
    return not computed and _pruner(linear) is None and bool(linear.weight.detach().ne(0).all())


def _pruner(linear: Linear) -> Any:
    """The hook of `torch.nn.utils.prune` by which a layer computes its weight, or None."""
    hooks = (x for x in linear._forward_pre_hooks.values() if isinstance(x, BasePruningMethod))
    return next((hook for hook in hooks if hook._tensor_name == "weight"), None)


def _lost(linear: Linear, pruner: object) -> str | None:
    """A description of a feature that a sparse copy of a layer would lose, or None."""
    attrs, parameters = vars(linear), list(linear.parameters(recurse=False))
    known = {*linear._parameters, "weight" if pruner is not None else ""}
    cases = {
        "a forward of its own": type(linear).forward is not Linear.forward or "forward" in attrs,
        "parametrizations: torch.nn.utils.parametrize.remove_parametrizations ends them":
            is_parametrized(linear),
        "a weight or bias that is computed at each call: remove_spectral_norm, remove_weight_norm "
        "or prune.remove of torch.nn.utils makes it a parameter": not {"weight", "bias"} <= known,
        "sizes that its first call tells: call it first": any(map(is_lazy, parameters)),
        "parameters on the device 'meta'": any(x.is_meta for x in parameters),
        "hooks of state dictionaries, whose names change":
            any(hooks for name, hooks in attrs.items() if "state_dict" in name),
        "hooks of its parameters, whose shapes change":
            any(x._backward_hooks or x._post_accumulate_grad_hooks for x in parameters),
    }  # fmt: skip
    return next((what for what, applies in cases.items() if applies), None)


def _keep(caller: str, layer: SparseLinear, linear: Linear, gone: set[str]) -> None:
    """Copy a layer's hooks, buffers and attributes to a sparse one, except names in `gone`."""
    usual = {*vars(Module()), "in_features", "out_features"}
    others = {**vars(linear), **linear._parameters, **linear._buffers, **linear._modules}
    if taken := [name for name in others if name not in usual | gone and hasattr(layer, name)]:
        raise wrong(caller, "linear", "no attributes with names of a SparseLinear's", f"{taken}")
    for name, value in vars(linear).items():
        kept = vars(layer).get(name)
        if name in usual and isinstance(kept, dict):
            rest = ((key, x) for key, x in value.items() if key not in gone)
            kept |= ((key, x) for key, x in rest if not isinstance(x, BasePruningMethod))
        elif name in usual and isinstance(kept, set):
            kept |= value
        elif name not in gone:
            vars(layer)[name] = value


def _move_hooks(layer: SparseLinear, linear: Linear) -> None:
    """Make handles that remove a layer's hooks remove those of its sparse copy."""
    for name, hooks in vars(linear).items():
        if "hooks" in name and isinstance(hooks, dict) and hooks is not vars(layer)[name]:
            vars(linear)[name] = hooks.copy()
            hooks.clear()
            hooks.update(vars(layer)[name])
            vars(layer)[name] = hooks


def prune(weight: Tensor, sparsity: float, block: tuple[int, int] | None = None) -> Tensor:
    """The mask of the weights of largest magnitude, or of the blocks of largest norm.

    Parameters
    ----------
    weight : (rows, columns) Tensor
        The weight.
    sparsity : float
        Share of the weights, or of the blocks, to prune, 0 to 1.
    block : (int, int), optional
        Rows and columns of the blocks, which must divide the weight's shape; None for single
        weights.

    Returns
    -------
    (rows, columns) Tensor, bool

    Examples
    --------
    >>> import torch
    >>> prune(torch.tensor([[3.0, 0.1], [-0.2, -4.0]]), 0.5)
    tensor([[ True, False],
            [False,  True]])
    """
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        got = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(f"prune: argument 'weight': expected two dimensions, got {got}")
    if isinstance(sparsity, bool) or not 0 <= sparsity <= 1:
        raise ValueError(f"prune: argument 'sparsity': expected 0 to 1, got {sparsity!r}")
    size = check_block("prune", weight, block) if block is not None else (1, 1)
    (m, n), (r, c) = weight.shape, size
    blocks = weight.detach().reshape(m // r, r, n // c, c).to(torch.float64)
    score = blocks.square().sum((1, 3)).flatten()
    kept = score.topk(round((1 - sparsity) * score.numel())).indices
    mask = torch.zeros_like(score, dtype=torch.bool)
    mask[kept] = True
    return mask.view(m // r, 1, n // c, 1).expand(m // r, r, n // c, c).reshape(m, n)


def check_block(caller: str, weight: Tensor, block: tuple[int, int]) -> tuple[int, int]:
    """Check a block's rows and columns, which must divide the weight's (ValueError)."""
    whole = isinstance(block, tuple | list) and len(block) == 2
    whole = whole and all(isinstance(b, int) and not isinstance(b, bool) and b > 0 for b in block)
    if not whole or weight.shape[0] % block[0] or weight.shape[1] % block[1]:
        expected = f"rows and columns that divide a weight of shape {tuple(weight.shape)}"
        raise wrong(caller, "block", expected, f"{block!r}")
    return block[0], block[1]
