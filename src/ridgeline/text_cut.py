"""Cut a name to what a column holds, at the side that tells least."""

from __future__ import annotations


def cut(text: str, width: int, side: str) -> str:
    """At most `width` characters of `text`, an ellipsis where it lost some: at its "start", "middle" or "end"."""
    if len(text) <= width:
        return text
    if side == "middle":
        tail = (width - 1) // 2
        return text[: width - 1 - tail] + "…" + text[len(text) - tail :]
    return "…" + text[len(text) - width + 1 :] if side == "start" else text[: width - 1] + "…"
