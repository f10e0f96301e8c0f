"""Sparse matrices and tensors, and readers of their sources."""
