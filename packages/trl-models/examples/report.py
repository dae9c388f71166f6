"""What a training run shows and writes down: a progress bar, metrics, a table and a picture."""

from __future__ import annotations

import json
import logging
import os
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path
    from types import TracebackType

    from rich.console import Console


def quiet_libraries() -> None:
    """Keep third-party libraries' warnings and progress bars out of what a script prints.

    This is for a whole process and the ranks it starts: call it from a script, not from a library.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    os.environ["PYTHONWARNINGS"] = "ignore"
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def make_console(shown: bool = True) -> Console:
    """Return a console that prints to standard output, or nowhere."""
    from rich.console import Console

    return Console(quiet=not shown, highlight=False)


class Metrics:
    """A context manager that shows each step's metrics and writes them as a line of JSON.

    Args:
        file: The file to write, or None to write nothing.
        steps: How many steps there will be.
        console: Where the bar is shown; where that is no terminal, each step is a line instead.
    """

    def __init__(self, file: Path | None, steps: int, console: Console) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self.rows: list[dict[str, float]] = []
        self.console = console
        self.bar = Progress(
            BarColumn(bar_width=8),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("", total=steps)
        self.file = None if file is None else file.open("w", encoding="utf-8")

    def __enter__(self) -> Metrics:
        self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.bar.stop()
        if self.file is not None:
            self.file.close()

    def add(self, row: dict[str, float]) -> None:
        """Add a step's metrics, among them its number as "step"."""
        self.rows.append(row)
        if self.file is not None:
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()
        values = (f"{key.replace('_', ' ')} {row[key]:.3f}" for key in row if key != "step")
        text = "  ".join(values)
        self.bar.update(self.task, advance=1, description=text)
        if not self.console.is_terminal:
            self.console.print(f"step {row['step']}: {text}")


def show_change(console: Console, rows: Iterable[tuple[str, str, str]]) -> None:
    """Print a table of what was before training and what is after it; each row has a heading."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_lines=True)
    for heading in ("", "before", "after"):
        table.add_column(heading, ratio=1)
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)


def draw(file: Path, rows: Sequence[dict[str, float]], panels: dict[str, str]) -> None:
    """Write a picture of four metrics over the steps; `panels` has their titles."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    for axes, (key, title) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        axes.plot([row["step"] for row in rows], [row[key] for row in rows], marker="o")
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    FigureCanvasAgg(figure)
    unfinished = file.with_name(f".{file.name}")
    figure.savefig(unfinished, format="png", dpi=120)
    unfinished.replace(file)
