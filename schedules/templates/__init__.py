"""Templates: schedules of operators that configs parametrise."""
