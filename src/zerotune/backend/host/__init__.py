"""Weight streaming: each unit of weights (such as a block) is on the device only while in use."""
