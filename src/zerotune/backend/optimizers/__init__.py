"""Torch optimizers: zerotune's own, and any that a plan names from torch or other packages."""
