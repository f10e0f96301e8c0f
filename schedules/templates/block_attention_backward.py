"""Gradients of attention over blocks on a CPU, by the schedule of `block_attention`."""

from sparsetir.schedules.operators.block_attention_backward import BlockAttentionBackward, program
from sparsetir.schedules.templates.block_attention import BlockTiles, apply

__all__ = ["BlockAttentionBackward", "BlockTiles", "apply", "program"]
