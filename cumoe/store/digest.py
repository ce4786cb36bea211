"""Whether a kernel's source has changed in a way that can matter."""

from __future__ import annotations

import hashlib

from cumoe.store.source import amalgamate, strip_comments


def source_digest(stem: str) -> str:
    """SHA-256 of ``<stem>.cu`` and all it includes, blind to comments, blanks and line numbers."""
    lines = (" ".join(line.split()) for line in strip_comments(amalgamate(stem)).split("\n"))
    kept = [line for line in lines if line and not line.startswith("#line ")]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()
