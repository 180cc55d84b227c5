"""Engines, verification and master weights.

This package contains all code that uses deepspeed or accelerate.
"""
