"""The options of `ppo.py`, checked before anything is loaded or written."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from engines import ENGINES, check_engine

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parse(arguments: Sequence[str] | None, description: str) -> argparse.Namespace:
    """Return the options, of the right types but not yet checked."""
    parser = _Parser(
        prog="ppo.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--engine", default="single", metavar="|".join(ENGINES), help="default: single")
    add("--processes", type=int, metavar="N", help="ranks; default: 1 for single, else 2")
    add("--steps", type=int, default=6, metavar="N", help="default: %(default)s")
    add("--model", metavar="PATH_OR_ID", help="default: SmolLM2-135M-Instruct")
    add("--output", type=Path, default=Path("runs/ppo"), metavar="DIR", help="default: %(default)s")
    add("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    add(
        "--completions",
        type=Path,
        metavar="FILE",
        help='JSON lines {"prompt": ..., "completion": ...} to learn from instead of generating',
    )
    options = parser.parse_args(arguments)
    if options.processes is None:
        options.processes = 1 if options.engine == "single" else 2
    return options


def check(options: argparse.Namespace) -> None:
    """Refuse options that can't work.

    Raises:
        ValueError: The message says which option, why, and what to do.
    """
    check_engine(options.engine, options.processes)
    if options.steps < 1:
        raise ValueError(f"--steps must be 1 or more, not {options.steps}.")
    nearest = next(path for path in (options.output, *options.output.parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ValueError(f"--output {options.output}: no folder can be written there.")
    if options.completions is not None:
        read_completions(options.completions)


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


def read_completions(file: Path) -> list[dict[str, str]]:
    """Return the prompts and completions of a file of JSON lines.

    Raises:
        ValueError: The file can't be read, is empty, or a line is not what it should be.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--completions {file} can't be read: {error}") from error
    if not lines:
        raise ValueError(f"--completions {file} is empty.")
    return [_completion(file, number, line) for number, line in enumerate(lines, start=1)]


def _completion(file: Path, number: int, line: str) -> dict[str, str]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    keys = ("prompt", "completion")
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in keys):
        raise ValueError(
            f"--completions {file}, line {number}: expected a JSON object with the strings "
            '"prompt" and "completion".'
        )
    return row
