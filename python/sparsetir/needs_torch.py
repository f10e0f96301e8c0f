"""Imported first by modules for torch: says what to install where there is none."""

from sparsetir.extras import need

NEEDED = "sparsetir.ops, sparsetir.nn, sparsetir.masks, sparsetir.distributed, sparsetir.graph"

need(NEEDED, "torch", "torch", title="PyTorch")
