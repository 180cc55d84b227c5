"""Export models and adapters for diffusers, peft and ComfyUI from an engine or a checkpoint."""
