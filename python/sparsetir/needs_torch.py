"""Imported first by modules that need torch: names what to install if it is missing."""

from sparsetir.extras import need

NEEDED = "sparsetir.ops, sparsetir.nn, sparsetir.masks, sparsetir.distributed, sparsetir.graph"

need(NEEDED, "torch", "torch", title="PyTorch")
