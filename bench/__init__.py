"""Benchmarks against other libraries and against estimates: ``python -m bench`` lists them."""
