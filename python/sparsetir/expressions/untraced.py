"""Expressions under torch.compile, which breaks its graph there."""

from __future__ import annotations

from typing import Any

from torch._compile import _disable_dynamo

from sparsetir.expressions.einsum import einsum

untraced: Any = _disable_dynamo(einsum)  # which imports what it takes when it is called
