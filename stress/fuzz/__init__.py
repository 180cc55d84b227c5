"""Anything at all, given to everything that reads: ``python -m stress.fuzz --minutes 1``."""
