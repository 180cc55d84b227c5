"""Randomised attacks with a seed and a time budget; ``tests/stress`` runs a few of each."""
