"""DeepSpeed: starting it, verifying it, mending it, and looking into it."""
