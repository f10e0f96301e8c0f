"""Stage-I schedules: transformations of sparse iterations in coordinate space."""

from sparsetir.sparse_ir.schedule.loops import SparseIterationRef, SpIter
from sparsetir.sparse_ir.schedule.schedule import Schedule
from sparsetir.sparse_ir.schedule.trace import Trace

__all__ = ["Schedule", "SpIter", "SparseIterationRef", "Trace"]
