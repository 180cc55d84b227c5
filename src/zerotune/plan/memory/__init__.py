"""Estimate the memory that a plan needs, by component, and the time of a training step."""
