"""Optimizers and schedules as data, without torch: names, arguments, states, curves."""
