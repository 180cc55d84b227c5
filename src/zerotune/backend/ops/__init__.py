"""DeepSpeed's compiled ops."""
