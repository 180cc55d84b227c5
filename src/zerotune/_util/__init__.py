"""Small helpers that every layer may use; the standard library only."""
