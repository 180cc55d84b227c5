"""Optimizers in torch: zerotune's classes, and those that a plan names in torch or packages."""
