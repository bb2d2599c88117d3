"""Files that are whole or absent: written beside their final name, then renamed over it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomically(path: str | os.PathLike[str], text: str) -> Path:
    """Write `text` to `path` so that no reader, and no crash, ever sees half of it.

    Args:
        path: The file to write; folders on the way are made.
        text: Its whole content, written as UTF-8.

    Returns:
        The path written.

    Raises:
        OSError: The folder cannot be made or written to; an older file at `path` is then left as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        # mkstemp gives 0600; a report is as readable as any file the user makes
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path
