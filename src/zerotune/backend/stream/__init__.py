"""Weight streaming: each unit of weights is on the device only while it is used."""
