"""Engines, verification and master weights: all code that uses deepspeed and accelerate."""
