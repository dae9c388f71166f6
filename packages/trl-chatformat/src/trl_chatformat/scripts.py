"""From messages to text that is ready to be encoded, and marked, piece by piece."""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from os.path import commonprefix
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
from trl_chatformat.turns import TrainOn, find_turns


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
        self._train_on = train_on
        self._include_trailing = include_trailing
        self._rendering = {k: v for k, v in named.items() if v is not None} | rendering
        stops = read_stop_tokens(tokenizer, generation_config, stop_tokens)
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
        shape = None if tools else read_shape(messages)
        layouts = shape and self._layouts.get(shape.key)
        if shape is None or not layouts:
            return None
        text = render_text(self._template, messages, tools=tools, **self._rendering)
        backend = self.encoder.backend
        if backend.secret in text:
            return None
        spelled = self.encoder.control.replace(text, backend.spellings)
        texts = shape.texts
        layout = next((known for known in layouts if known.spell(texts) == spelled), None)
        if layout is None:
            return None
        script = Script(spelled, layout.steps, lambda: layout.fill(texts))
        return WrittenChat(text, script, [], messages)

    def _trace(self, conversation: Conversation, changes: Mapping[str, Any]) -> WrittenChat:
        messages, tools = conversation
        rendered = render_chat(self._template, messages, tools=tools, **self._rendering | changes)
        text, spans = rendered.text, rendered.spans
        found, neutralised = find_written(self.encoder.control, text, spans, self.trust)
        runs = [Run(s.start, s.end, _get_message(s.origin), s.origin) for s in spans]
        stops = [f for f in found if f.token in self._stops]
        turns = find_turns(
            rendered,
            messages,
            self._read_prompt(messages, tools, changes),
            [(stop.start, stop.end) for stop in stops],
            [hit.start for hit in found],
            train_on=self._train_on,
            include_trailing=self._include_trailing,
        )
        trained = [(turn.start, turn.end) for turn in turns if turn.start < turn.end]
        pieces = cut(text, runs, trained, found, list(find_turn_ends(runs, stops)))
        script = self.encoder.write(pieces)
        shape = read_shape(messages)
        if not changes and not tools and not neutralised and shape is not None:
            layout = Layout.read(pieces, script.steps, shape.texts, self.encoder.spell)
            known = self._layouts.setdefault(shape.key, [])
            if layout is not None and len(known) < MOST:
                known.append(layout)
        return WrittenChat(text, script, neutralised, messages)

    def _read_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, changes: Mapping[str, Any]
    ) -> str:
        """Tell what the template writes to begin an answer, after the messages before the first."""
        first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), None)
        before = messages[: first or None]
        settings = {**self._rendering, **changes, "continue_final_message": False}
        texts = []
        for prompt in (False, True):
            settings["add_generation_prompt"] = prompt
            try:
                texts.append(render_text(self._template, before, tools=tools, **settings))
            except ValueError:
                return ""  # the template asks for an answer
        without, with_prompt = texts
        return with_prompt[len(commonprefix([without, with_prompt])) :]


def _list_templates(template: str | Mapping[str, str] | None) -> list[str]:
    if template is None:
        return []
    return [template] if isinstance(template, str) else list(template.values())


def _get_message(origin: Origin | None) -> int:
    return -1 if origin is None or origin.message is None else origin.message


def find_turn_ends(runs: Sequence[Run], stops: Sequence[Found]) -> Iterator[tuple[int, int]]:
    """Finds the stop token of each message's turn: the first one between it and the next message.

    Args:
        runs: Where the text's characters come from.
        stops: The stop tokens that the template wrote, in order.

    Returns:
        Where each begins, and the message.
    """
    own = [run for run in runs if run.message >= 0]
    position = 0
    for run, following in pairwise([*own, None]):
        if following is not None and following.message == run.message:
            continue
        while position < len(stops) and stops[position].start < run.end:
            position += 1
        before = following.start if following is not None else float("inf")
        if position < len(stops) and stops[position].start < before:
            yield stops[position].start, run.message


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
