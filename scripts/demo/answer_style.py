"""The answer style that the demo teaches: a short answer, three numbered steps, what it costs and what it frees.

It is the way this project describes its own memory techniques (*Frees*, *Costs*), applied to everyday questions. A
small model does not answer like this unless it was taught to, and a program can check whether it does.
"""

from __future__ import annotations

import re

_LINE_PATTERNS = (
    r"Short answer: \S.*",
    *(rf"{number}\. \S.*" for number in range(1, 4)),
    r"Costs: \S.*",
    r"Frees: \S.*",
)


def follows_style(answer: str) -> bool:
    """Return whether an answer has exactly the six lines of the style, in their order, each with some content."""
    lines = answer.strip().split("\n")
    return len(lines) == len(_LINE_PATTERNS) and all(
        re.fullmatch(pattern, line) for pattern, line in zip(_LINE_PATTERNS, lines, strict=True)
    )
