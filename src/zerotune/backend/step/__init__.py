"""The fused optimizer step in host memory, immediate or deferred, independent of any engine."""
