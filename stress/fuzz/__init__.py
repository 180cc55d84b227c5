"""Feed arbitrary input to everything that parses: ``python -m stress.fuzz --minutes 1``."""
