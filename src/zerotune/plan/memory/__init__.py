"""Estimates of a plan's memory, by component, and of the time of a training step."""
