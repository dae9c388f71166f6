"""From messages to text that is ready to be encoded, and marked, piece by piece."""

import warnings
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

from trl_chatformat.backends import read_added_tokens, read_named_tokens
from trl_chatformat.control_tokens import Found
from trl_chatformat.conversations import Conversation
from trl_chatformat.encoder import Script, make_encoder
from trl_chatformat.layouts import MOST, Layout, read_shape
from trl_chatformat.placing import Run, cut
from trl_chatformat.provenance import Origin
from trl_chatformat.rendering import render_chat, render_text
from trl_chatformat.safety import Neutralised, Trust, find_written
from trl_chatformat.turns import TrainOn, Turn, find_turns, read_prompt


class WrittenChat(NamedTuple):
    """A rendered conversation, ready to be encoded."""

    text: str
    script: Script
    neutralised: list[Neutralised]
    messages: Sequence[Mapping[str, Any]]


class Writer:
    """Renders conversations under the same settings, those of `encode_chat`."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        generation_config: Any = None,
        stop_tokens: Collection[str | int] = (),
        control_tokens: Collection[str] = (),
        trust: Trust = None,
        train_on: TrainOn = "all",
        include_trailing: bool = False,
        **rendering: Any,
    ) -> None:
        self.truncation_side: str = getattr(tokenizer, "truncation_side", "right")
        own = getattr(tokenizer, "chat_template", None)
        self._template = own if chat_template is None else chat_template
        named = read_named_tokens(tokenizer)
        self.trust = trust
        self._rendering: dict[str, Any] = {k: v for k, v in named.items() if v is not None}
        self._rendering |= rendering
        stops = read_stop_tokens(tokenizer, generation_config, stop_tokens)
        self._train_on = train_on
        self._include_trailing = include_trailing
        self._layouts: dict[Hashable, list[Layout]] = {}
        templates = _list_templates(self._template)
        self.encoder, ids = make_encoder(tokenizer, templates, stops, control_tokens)
        self._stops = set(ids.values())
        self.eos = ids.get(named["eos_token"] or "")

    def write(self, conversation: Conversation, **changes: Any) -> WrittenChat:
        """Renders a conversation, under settings of rendering that may differ.

        Raises:
            ValueError: The template refuses it, or text of unknown origin spells a control token.
        """
        known = None if changes else self._write_known(conversation)
        return known or self._trace(conversation, changes)

    def _write_known(self, conversation: Conversation) -> WrittenChat | None:
        messages, tools = conversation
        # A function may choose by what messages say.
        shape = None if tools or callable(self._train_on) else read_shape(messages)
        layouts = shape and self._layouts.get(shape.key)
        if shape is None or not layouts:
            return None
        text = render_text(self._template, messages, tools=tools, **self._rendering)
        backend = self.encoder.backend
        if backend.secret in text:
            return None
        spelled = self.encoder.control.replace(text, backend.spellings)
        texts = shape.texts
        layout = next((known for known in layouts if known.fits(texts, spelled)), None)
        if layout is None:
            return None
        script = Script(spelled, layout.steps, lambda: layout.fill(texts))
        return WrittenChat(text, script, [], messages)

    def _trace(self, conversation: Conversation, changes: Mapping[str, Any]) -> WrittenChat:
        messages, tools = conversation
        rendered = render_chat(
            self._template, messages, tools=tools, **{**self._rendering, **changes}
        )
        text, spans = rendered.text, rendered.spans
        found, neutralised = find_written(self.encoder.control, text, spans, self.trust)
        stops = [hit for hit in found if hit.token in self._stops]
        prompt = self._write_prompt(conversation)
        turns = find_turns(
            rendered,
            messages,
            prompt,
            [(hit.start, hit.end) for hit in stops],
            [(hit.start, hit.end) for hit in found],
            train_on=self._train_on,
            include_trailing=self._include_trailing,
        )
        self._report_open(turns, changes)
        runs = [Run(s.start, s.end, _get_message(s.origin), s.origin) for s in spans]
        ends = list(find_turn_ends(runs, stops, len(messages)))
        pieces = cut(text, runs, [(turn.start, turn.end) for turn in turns], found, ends)
        script = self.encoder.write(pieces)
        shape = read_shape(messages)
        if not changes and not tools and not neutralised and shape is not None:
            layout = Layout.read(pieces, script.steps, shape.texts, self.encoder.spell, prompt)
            known = self._layouts.setdefault(shape.key, [])
            if layout is not None and len(known) < MOST:
                known.append(layout)
        return WrittenChat(text, script, neutralised, messages)

    def _write_prompt(self, conversation: Conversation) -> str:
        # What asks for the first answer, or for another one.
        messages, tools = conversation
        roles = [message["role"] for message in messages]
        first = roles.index("assistant") if "assistant" in roles else 0
        settings: dict[str, Any] = {**self._rendering, "continue_final_message": False}
        for asked in (messages[:first], messages):
            if asked:
                with suppress(ValueError):
                    without, prompted = (
                        render_text(
                            self._template,
                            asked,
                            tools=tools,
                            **(settings | {"add_generation_prompt": asks}),
                        )
                        for asks in (False, True)
                    )
                    prompt = read_prompt(without, prompted)
                    if prompt:
                        return prompt
        return ""

    def _report_open(self, turns: Sequence[Turn], changes: Mapping[str, Any]) -> None:
        goes_on = {**self._rendering, **changes}.get("continue_final_message")
        if turns and not turns[-1].ended and not goes_on:
            warnings.warn(
                "The template writes no stop token after the assistant's last message, so its mask "
                "goes to the end of the text: give `generation_config` or `stop_tokens`.",
                stacklevel=2,
            )


def _list_templates(template: str | Mapping[str, str] | None) -> list[str]:
    if template is None:
        return []
    return [template] if isinstance(template, str) else list(template.values())


def _get_message(origin: Origin | None) -> int:
    return -1 if origin is None or origin.message is None else origin.message


def find_turn_ends(
    runs: Sequence[Run], stops: Sequence[Found], count: int
) -> Iterator[tuple[int, int]]:
    """Finds the stop token of each message's turn.

    It is the first one after the message; messages that show nowhere have those that follow.

    Args:
        runs: Where the text's characters come from.
        stops: The stop tokens that the template wrote, in order.
        count: How many messages there are.

    Returns:
        Where each begins, and the message.
    """
    own = [run for run in runs if run.message >= 0]
    first = own[0] if own else Run(0, 0, count)
    before = [stop.start for stop in stops if stop.start < first.start]
    # The template may have begun with a turn of its own.
    yield from zip(reversed(before), range(first.message - 1, -1, -1), strict=False)
    end_of_text = Run(runs[-1].end, runs[-1].end, count) if runs else first
    position = len(before)
    for run, following in pairwise([*own, end_of_text]):
        between = []
        while position < len(stops) and stops[position].start < following.start:
            between.append(stops[position].start)
            position += 1
        if following.message != run.message:
            yield from zip(between, range(run.message, following.message), strict=False)


def read_stop_tokens(
    tokenizer: Any, generation_config: Any = None, more: Collection[str | int] = ()
) -> list[str]:
    """Lists the tokens that end turns.

    Args:
        tokenizer: Whose eos token is one, if it has one.
        generation_config: An object or a dict with `eos_token_id`, one or several, or None.
        more: Texts or ids.

    Returns:
        Their texts.

    Raises:
        ValueError: An id is not that of an added token.
    """
    if isinstance(generation_config, Mapping):
        ids = generation_config.get("eos_token_id")
    else:
        ids = getattr(generation_config, "eos_token_id", None)
    given = [
        read_named_tokens(tokenizer)["eos_token"],
        *(ids if isinstance(ids, Sequence) else [ids]),
        *more,
    ]
    added = read_added_tokens(tokenizer)
    texts = []
    for token in given:
        if isinstance(token, int):
            if token not in added:
                raise ValueError(
                    f"The stop token {token} is not the id of an added token of the tokenizer."
                )
            token = added[token].content
        if token is not None:
            texts.append(token)
    return list(dict.fromkeys(texts))
