"""The only door to deepspeed and accelerate: engines, verification, master weights."""
