"""zerotune's own torch optimizers, and those of torch or other packages that a plan names."""
