"""Engines, verification and master weights. All code that uses deepspeed or accelerate is here."""
