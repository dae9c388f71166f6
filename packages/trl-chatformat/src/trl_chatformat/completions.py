"""Prompts and what answers them, for preference and reward training."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trl_chatformat.backends import read_beginning_tokens
from trl_chatformat.conversations import read_conversation, read_rows
from trl_chatformat.encoder import Script, Tokens
from trl_chatformat.placing import Mark, Piece, Run, cut
from trl_chatformat.safety import is_trusted
from trl_chatformat.scripts import Writer
from trl_chatformat.truncating import Side, check_truncation, choose_part

ANSWERS = (("completion",), ("chosen", "rejected"))


def encode_completions(
    tokenizer: Any,
    rows: Any,
    *,
    tools: Sequence[Any] | None = None,
    max_length: int | None = None,
    truncation_side: Side | None = None,
    **settings: Any,
) -> dict[str, list[Any]]:
    """Encodes prompts with their completions, or with a chosen and a rejected one.

    Each prompt's ids are where the ids of prompt and completion, encoded as one, begin: where the
    two merge into one token, that token is the completion's.

    Args:
        tokenizer: As for `encode_chat`.
        rows: Rows with `prompt` and `completion`, or with `prompt`, `chosen` and `rejected`, each a
            list of messages or all text, and perhaps their own `tools`; or a batch of such rows as
            `Dataset.map(batched=True)` passes it. Text gets the tokenizer's beginning tokens and
            its eos token; fields for `trust` are the columns' names.
        tools: For rows without their own.
        max_length: The most tokens of a prompt and a completion together.
        truncation_side: As for `encode_chat`.
        settings: The other arguments of `encode_chat`.

    Returns:
        Columns: `prompt_ids`; for each answer its ids, such as `completion_ids`, and a mask, such
        as `completion_mask`, of what is trained on; and, as numbers, `neutralised` and `truncated`.

    Raises:
        ValueError: Rows lack a column or mix them; otherwise as `encode_chat` does.
        TypeError: As `encode_chat` does.

    Example:
        >>> from tokenizers import Tokenizer, models
        >>> from trl_chatformat import ChatTokenizer
        >>> vocabulary = {"a": 0, "b": 1, "ab": 2}
        >>> tokenizer = ChatTokenizer(Tokenizer(models.BPE(vocabulary, [("a", "b")])))
        >>> encode_completions(tokenizer, [{"prompt": "aa", "completion": "ba"}])["prompt_ids"]
        [[0]]
    """
    check_truncation(max_length, truncation_side)
    writer = Writer(tokenizer, **settings)
    side = truncation_side or writer.truncation_side
    write = _AnswerWriter(writer, read_beginning_tokens(tokenizer), tools)
    written: list[dict[str, _Answer]] = []
    for number, row in enumerate(read_rows(rows)):
        try:
            written.append({name: write(row, name) for name in _find_answers(row)})
        except ValueError as error:
            error.add_note(f"This was row {number}.")
            raise
    names = tuple(written[0]) if written else ANSWERS[0]
    if any(tuple(answers) != names for answers in written):
        raise ValueError(
            "Some rows have a `completion`, others `chosen` and `rejected`: encode them apart."
        )
    scripts = [s for answers in written for a in answers.values() for s in (a.prompt, a.whole)]
    tokens = iter(writer.encoder.encode(scripts))
    outputs = [f"{name}_{kind}" for name in names for kind in ("ids", "mask")]
    columns: dict[str, list[Any]] = {
        name: [] for name in ("prompt_ids", *outputs, "neutralised", "truncated")
    }
    for answers in written:
        pairs = {
            name: (answer.begin(next(tokens)), answer.begin(next(tokens)))
            for name, answer in answers.items()
        }
        end = min(_count_common(prompt.ids, whole.ids) for prompt, whole in pairs.values())
        wholes = {name: whole for name, (_, whole) in pairs.items()}
        kept = [_choose(writer, whole, max_length, side) for whole in wholes.values()]
        # The answers have one prompt, also where a longer one leaves less room for it.
        start = min(end, max(part.start for part in kept))
        prompt = wholes[names[0]].ids[start : min([end, *(part.stop for part in kept)])]
        columns["prompt_ids"].append(prompt)
        cut_off = end - len(prompt)
        for (name, whole), part in zip(wholes.items(), kept, strict=True):
            answer = slice(max(end, part.start), part.stop)
            columns[f"{name}_ids"].append(whole.ids[answer])
            columns[f"{name}_mask"].append(whole.masks[answer])
            cut_off += len(whole.ids) - end - len(whole.ids[answer])
        neutralised = max(answer.neutralised for answer in answers.values())
        columns["neutralised"].append(neutralised)
        columns["truncated"].append(cut_off)
    return columns


def _choose(writer: Writer, whole: Tokens, max_length: int | None, side: str) -> slice:
    if max_length is None:
        return slice(0, len(whole.ids))
    control = writer.encoder.control.contents
    return choose_part(whole.ids, whole.messages, control, max_length, side)


class _Answer(NamedTuple):
    """A prompt alone, as it is asked, and with one answer to it."""

    prompt: Script
    whole: Script
    neutralised: int
    beginning: Sequence[int] = ()  # not written, or a text would not begin where it does

    def begin(self, tokens: Tokens) -> Tokens:
        """Puts the beginning tokens first."""
        ids, masks, messages = tokens
        begin = self.beginning
        return Tokens([*begin, *ids], [0] * len(begin) + masks, [-1] * len(begin) + messages)


class _AnswerWriter:
    def __init__(
        self, writer: Writer, beginning: Sequence[int], tools: Sequence[Any] | None
    ) -> None:
        self._writer = writer
        self._beginning = beginning
        self._tools = tools

    def __call__(self, row: Mapping[str, Any], name: str) -> _Answer:
        prompt, answer = row["prompt"], row[name]
        if isinstance(prompt, str) and isinstance(answer, str):
            return self._write_text(prompt, answer, name)
        if isinstance(prompt, str) or isinstance(answer, str):
            raise ValueError(
                f"`prompt` and `{name}` must both be text, or both be lists of messages."
            )
        own = row.get("tools")
        tools = self._tools if own is None else own
        whole = self._writer.write(read_conversation([*prompt, *answer], tools))
        asked = self._writer.write(read_conversation(prompt, tools), **_ask(prompt, answer))
        return _Answer(asked.script, whole.script, len(whole.neutralised))

    def _write_text(self, prompt: str, answer: str, name: str) -> _Answer:
        encoder, eos = self._writer.encoder, self._writer.eos
        first, first_count = self._cut(prompt, "prompt", trained=False)
        second, second_count = self._cut(answer, name, trained=True)
        if eos is not None and not (second and second[-1].token == eos):
            second.append(Piece("", eos, Mark(-1, True)))
        return _Answer(
            encoder.write(first),
            encoder.write([*first, *second]),
            first_count + second_count,
            self._beginning,
        )

    def _cut(self, text: str, field: str, trained: bool) -> tuple[list[Piece], int]:
        if not text:
            return [], 0
        found = self._writer.encoder.control.find(text)
        trusted = is_trusted(self._writer.trust, None, field)
        runs = [Run(0, len(text), -1, field)]
        spans = [(0, len(text))] if trained else []
        return cut(text, runs, spans, found if trusted else []), 0 if trusted else len(found)


def _ask(
    prompt: Sequence[Mapping[str, Any]], answer: Sequence[Mapping[str, Any]]
) -> dict[str, bool]:
    # The answer may be a turn of its own, or go on with the prompt's last one.
    if not answer or answer[0].get("role") != "assistant":
        return {}
    goes_on = bool(prompt) and prompt[-1].get("role") == "assistant"
    return {"continue_final_message": goes_on, "add_generation_prompt": not goes_on}


def _find_answers(row: Any) -> tuple[str, ...]:
    if isinstance(row, Mapping) and "prompt" in row:
        found = [names for names in ANSWERS if all(row.get(name) is not None for name in names)]
        if len(found) == 1:
            return found[0]
    raise ValueError(
        "A row was expected to have `prompt` and either `completion`, or `chosen` and `rejected`: "
        f"it has {sorted(row) if isinstance(row, Mapping) else type(row).__name__}."
    )


def _count_common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
