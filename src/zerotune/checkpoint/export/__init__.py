"""What plain diffusers, peft and ComfyUI load, written from an engine or a checkpoint."""
