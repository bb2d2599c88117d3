"""What an error message has to say."""

from __future__ import annotations

import re


def containing(*words: object) -> str:
    """A pattern for `pytest.raises(match=...)`: every one of the words, in any order."""
    return "(?s)" + "".join(f"(?=.*{re.escape(str(word))})" for word in words)
