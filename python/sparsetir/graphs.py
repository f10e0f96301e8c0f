"""Graphs from files: the public name of :mod:`sparsetir.data.graphs`."""

from sparsetir.data.graphs import GraphError, graph_name, layers, load_graph, load_relations

__all__ = ["GraphError", "graph_name", "layers", "load_graph", "load_relations"]
