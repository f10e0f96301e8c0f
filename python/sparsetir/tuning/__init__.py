"""The tuner: searches of formats and schedules for operators and programs."""
