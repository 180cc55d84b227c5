"""The rules themselves, by subject. Importing them registers them with ``zerotune.plan.rules``.

What a rule says of DeepSpeed was read in the code of 0.19.8, or seen when it ran.
"""

from __future__ import annotations

from zerotune.plan.rulebook import batch, offload, optimizer, precision, schedule, swapping, zero
from zerotune.plan.rules import registered

# Importing a module has registered its rules.
_SUBJECTS = (batch, offload, optimizer, precision, schedule, swapping, zero)

RULES = registered()
"""Every rule, in the order they are checked."""
