"""Pictures of patterns and formats: the public name of :mod:`sparsetir.plotting`."""

from sparsetir.plotting.kernel_map import plot_kernel_map
from sparsetir.plotting.patterns import plot_format, plot_pattern

__all__ = ["plot_format", "plot_kernel_map", "plot_pattern"]
