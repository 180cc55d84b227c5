"""Words that people type: compared without case and punctuation, and what they may have meant."""

from __future__ import annotations

import re
from collections.abc import Iterable


def squash(word: str) -> str:
    """Letters and digits of ``word`` in lower case: ``"0/1-Adam"`` becomes ``"01adam"``."""
    return re.sub(r"[^a-z0-9]", "", word.lower())


def did_you_mean(
    word: str, candidates: Iterable[str], *, count: int = 3, cutoff: float = 0.6
) -> list[str]:
    """The candidates that look most like ``word``, best first.

    Args:
        word: As written.
        candidates: What there is; case and punctuation are not compared.
        count: How many at most.
        cutoff: Likeness from 0 to 1 that a candidate must have.
    """
    import difflib  # Only who has misspelt something waits for it.

    by_key = {squash(candidate): candidate for candidate in candidates}
    close = difflib.get_close_matches(squash(word), list(by_key), n=count, cutoff=cutoff)
    return [by_key[key] for key in close]
