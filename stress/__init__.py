"""Attacks with a seed and a budget; the suite takes a few of each (``tests/stress``)."""
