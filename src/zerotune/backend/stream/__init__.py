"""Streaming of weights, unit by unit: on the device while used, otherwise in host memory."""
