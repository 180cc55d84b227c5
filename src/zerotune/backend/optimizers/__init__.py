"""Torch optimizers: zerotune's own, and those from torch or other packages that a plan names."""
