"""Torch optimizers: zerotune's classes, and those that a plan names from torch or packages."""
