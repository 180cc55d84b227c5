"""Model families: how each reads a batch and calls its model."""
