"""Start DeepSpeed, verify its engine, correct its errors, and access its internals."""
