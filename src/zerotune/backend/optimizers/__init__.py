"""Optimizers in torch: zerotune's own, and whatever a plan names of torch's and of packages."""
