"""Model families, which turn batches into inputs and call their models."""
