"""Small helpers for every layer; this package is above ``errors`` and below everything else."""
