"""Optimizers and schedules: what exists, what can run, and what is chosen for a plan."""
