"""Writing several files of a folder together: all of them, or none."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory


def write_together(folder: Path, texts: Mapping[str, str], remove: Collection[str] = ()) -> None:
    """Writes files into a folder, and takes away outdated ones; if anything fails, changes nothing.

    Args:
        folder: Where to; made if it doesn't exist.
        texts: What to write, by file name.
        remove: Names to take away where they exist.

    Example:
        >>> with TemporaryDirectory() as parent:
        ...     write_together(Path(parent, "out"), {"a.txt": "one", "b.txt": "two"})
        ...     sorted(os.listdir(Path(parent, "out")))
        ['a.txt', 'b.txt']
    """
    contents = {name: text.encode() for name, text in texts.items()}
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Inside the folder where it exists: it may be a mount, and only a move within one is whole.
    place = folder if folder.exists() else folder.parent
    with TemporaryDirectory(dir=place, prefix=f".{folder.name}-") as stage:
        new, old = Path(stage, "new"), Path(stage, "old")
        new.mkdir()
        old.mkdir()
        for name, content in contents.items():
            (new / name).write_bytes(content)
        if not folder.exists():
            new.rename(folder)
            return
        steps = [(folder / name, old / name) for name in [*contents, *remove]]
        steps = [step for step in steps if os.path.lexists(step[0])]
        steps += [(new / name, folder / name) for name in contents]
        _move_all(steps)


def _move_all(steps: list[tuple[Path, Path]]) -> None:
    done: list[tuple[Path, Path]] = []
    try:
        for source, target in steps:
            os.replace(source, target)
            done.append((source, target))
    except BaseException:
        for source, target in reversed(done):
            os.replace(target, source)
        raise
