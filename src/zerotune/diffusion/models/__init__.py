"""Model families, which convert batches to model inputs and call the models."""
