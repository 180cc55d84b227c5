"""Anything at all, given to everything that reads: ``python -m tests.fuzz --minutes 1``."""
