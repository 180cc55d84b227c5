"""Describe optimizers and schedules without torch: names, arguments, states and curves."""
