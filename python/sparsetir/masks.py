"""Masks of sparse attention: the public name of :mod:`sparsetir.data.masks`."""

from sparsetir.data.masks import (
    BlockMask,
    band,
    bigbird,
    blocks,
    butterfly,
    causal,
    from_dense,
    from_elements,
    global_tokens,
)

__all__ = [
    "BlockMask", "band", "bigbird", "blocks", "butterfly", "causal", "from_dense", "from_elements",
    "global_tokens",
]  # fmt: skip
