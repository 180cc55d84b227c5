"""Configurations of public repositories, and what DeepSpeed and accelerate say of each."""
