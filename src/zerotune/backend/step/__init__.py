"""The optimizer's step in host memory: one pass, taken at once or later; knows no engine."""
