"""The command line of the examples, checked before anything is loaded or written."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import real_data
from engines import ENGINES, check_engine, launch
from report import make_console

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


@dataclass(frozen=True)
class Script:
    """An example: its file, and the option for recorded rows with what each row holds."""

    file: str
    rows: str
    keys: tuple[str, ...]
    steps: int  # by default

    @property
    def name(self) -> str:
        return Path(self.file).stem


def start(
    script: Script,
    description: str | None,
    arguments: Sequence[str] | None,
    train: Callable[[argparse.Namespace, Any, Console], None],
) -> int:
    """Check the options, start the ranks or train on this one, and return the exit code."""
    options = _parse(script, description, arguments)
    console = make_console(shown=os.environ.get("RANK", "0") == "0")
    try:
        _check(script, options)
        if options.model is None:
            with console.status("Preparing model and conversations: half a minute, once"):
                options.model = str(real_data.smollm2())
        tokenizer = load_tokenizer(options.model)
    except (ValueError, RuntimeError) as error:
        print(f"{script.name}.py: {error}", file=sys.stderr)
        return 2
    if options.engine != "single" and "LOCAL_RANK" not in os.environ:
        given = sys.argv[1:] if arguments is None else arguments
        return launch(script.file, given, options.engine, options.processes)
    train(options, tokenizer, console)
    return 0


def _parse(
    script: Script, description: str | None, arguments: Sequence[str] | None
) -> argparse.Namespace:
    parser = _Parser(
        prog=f"{script.name}.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    output = Path("runs") / script.name
    row = ", ".join(f'"{key}": ...' for key in script.keys)
    add("--engine", default="single", metavar="|".join(ENGINES), help="default: single")
    add("--processes", type=int, metavar="N", help="ranks; default: 1 for single, else 2")
    add("--steps", type=int, default=script.steps, metavar="N", help="default: %(default)s")
    add("--model", metavar="PATH_OR_ID", help="default: SmolLM2-135M-Instruct")
    add("--output", type=Path, default=output, metavar="DIR", help="default: %(default)s")
    add("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    add(f"--{script.rows}", type=Path, metavar="FILE", help=f"JSON lines {{{row}}} to learn from")
    options = parser.parse_args(arguments)
    if options.processes is None:
        options.processes = 1 if options.engine == "single" else 2
    return options


def _check(script: Script, options: argparse.Namespace) -> None:
    """Raise a ValueError that says which option can't work, why, and what to do."""
    check_engine(options.engine, options.processes)
    if options.steps < 1:
        raise ValueError(f"--steps must be 1 or more, not {options.steps}.")
    nearest = next(path for path in (options.output, *options.output.parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ValueError(f"--output {options.output}: no folder can be written there.")
    if (file := getattr(options, script.rows)) is not None:
        read_rows(script, file)


def load_tokenizer(model: str) -> Any:
    """Return the tokenizer of a model that can be trained to chat.

    Raises:
        ValueError: There is no such model, or its tokenizer has no chat template or eos token.
    """
    from transformers import AutoConfig, AutoTokenizer

    try:
        AutoConfig.from_pretrained(model)
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--model {model} is neither a folder with a model and its tokenizer nor an id that "
            f"could be fetched ({str(error).splitlines()[0]})"
        ) from error
    if tokenizer.chat_template is None or tokenizer.eos_token_id is None:
        lack = "chat template" if tokenizer.chat_template is None else "eos token"
        raise ValueError(
            f"The tokenizer of --model {model} has no {lack}: give it one, for example with "
            "trl_models.setup_chat_format, and save model and tokenizer together."
        )
    return tokenizer


def read_rows(script: Script, file: Path) -> list[dict[str, str]]:
    """Return the rows of a file of JSON lines.

    Raises:
        ValueError: The file can't be read, is empty, or a line is not what it should be.
    """
    option = f"--{script.rows} {file}"
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{option} can't be read: {error}") from error
    if not lines:
        raise ValueError(f"{option} is empty.")
    return [_read_row(script, option, *line) for line in enumerate(lines, start=1)]


def _read_row(script: Script, option: str, number: int, line: str) -> dict[str, str]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in script.keys):
        *first, last = (f'"{key}"' for key in script.keys)
        raise ValueError(
            f"{option}, line {number}: expected a JSON object with the strings "
            f"{', '.join(first)} and {last}."
        )
    return row
