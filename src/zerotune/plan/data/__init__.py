"""What was read off DeepSpeed and is on file here."""
