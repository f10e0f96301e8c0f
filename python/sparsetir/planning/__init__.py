"""An operator on a pattern: what is asked for, checked; the plan that runs it."""
