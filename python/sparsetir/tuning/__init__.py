"""Search over formats and schedules for an operator on a matrix."""
