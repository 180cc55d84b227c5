"""Optimizers and schedules as data: names, arguments, states per weight, curves. No torch."""
