"""Folders that are whole or not there at all."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator


@contextlib.contextmanager
def whole_folder(target: Path, *, replace: bool) -> Generator[Path]:
    """Yield a new folder beside the target, which takes the target's place once it is filled.

    An error or an interruption inside leaves the target as it was.

    Args:
        target: Where the folder will lie; its parent is made if need be.
        replace: Whether to replace what lies there. Otherwise the first of several processes wins,
            and the others' work is dropped.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    new, old = beside / "new", beside / "old"
    try:
        new.mkdir()
        yield new
        if replace and target.exists():
            target.rename(old)
        try:
            new.rename(target)
        except OSError:
            # A folder is never put in place of a full one, which another process made meanwhile.
            if replace or not target.exists():
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
