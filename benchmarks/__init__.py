"""Measurements, one command each: ``nox -s bench -- NAME``."""
