"""Export models and adapters for diffusers and peft from an engine or a checkpoint."""
