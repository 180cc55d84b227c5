"""Fill in the values that a plan leaves open; rules and estimates call the same functions."""
