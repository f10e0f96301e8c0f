"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text as UTF-8; the file appears, or is replaced, when it is complete.

    Raises OSError, and then leaves what was there as it was.
    """
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(unfinished, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
