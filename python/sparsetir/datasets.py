"""Data that ships with the package: the public name of :mod:`sparsetir.data.datasets`."""

from sparsetir.data.datasets import NodeClassification, load_cora, load_cora_dataset

__all__ = ["NodeClassification", "load_cora", "load_cora_dataset"]
