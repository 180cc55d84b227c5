"""Weights by unit: on the device while they are used, in host memory otherwise."""
