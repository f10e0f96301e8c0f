"""Sparse matrices and tensors, and what they are made from."""
