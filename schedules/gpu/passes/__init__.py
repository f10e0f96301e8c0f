"""Rewrites of stages II and III for GPUs."""
