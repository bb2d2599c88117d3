"""Files that are whole or absent: written beside their final name, then renamed over it."""

from __future__ import annotations

import csv
import io
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Write `content` to `path` so that no reader, and no crash, ever sees half of it.

    Args:
        path: The file to write; folders on the way are made.
        content: Its whole content; a string is written as UTF-8.

    Returns:
        The path written.

    Raises:
        OSError: The folder cannot be made or written to; an older file at `path` is then left as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{uuid.uuid4().hex}.tmp"
    try:
        with open(temporary, "xb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())  # a rename may reach the disk before the content does
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A table as CSV. None is an empty field.

    Args:
        columns: Column names in order.
        rows: Values by column.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
