"""The formats of well-known models: what they write, mark, add and refuse."""

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from trl_chatformat import (
    FORMAT_MAPPING,
    ChatMlSpecialTokens,
    encode_chat,
    register_format,
    render_chat,
    setup_chat_format,
)

TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Bye\n"},
    {"role": "assistant", "content": "Bye."},
]
WRITTEN = {
    "chatml": (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n"
        "<|im_start|>user\nBye\n<|im_end|>\n<|im_start|>assistant\nBye.<|im_end|>\n"
    ),
    "llama3": (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nYes?<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nBye.<|eot_id|>"
    ),
    "gemma": (
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nYes?<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\nBye.<end_of_turn>\n"
    ),
    "qwen3": (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n"
        "<|im_start|>user\nBye\n<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\nBye.<|im_end|>\n"
    ),
    "phi4": (
        "<|im_start|>user<|im_sep|>Hi<|im_end|><|im_start|>assistant<|im_sep|>Yes?<|im_end|>"
        "<|im_start|>user<|im_sep|>Bye\n<|im_end|><|im_start|>assistant<|im_sep|>Bye.<|im_end|>"
    ),
    "zephyr": (
        "<|user|>\nHi</s>\n<|assistant|>\nYes?</s>\n<|user|>\nBye\n</s>\n<|assistant|>\nBye.</s>\n"
    ),
}
PROMPTS = {
    "chatml": "<|im_start|>assistant\n",
    "llama3": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "<start_of_turn>model\n",
    "qwen3": "<|im_start|>assistant\n",
    "phi4": "<|im_start|>assistant<|im_sep|>",
    "zephyr": "<|assistant|>\n",
}
KNOWN = sorted(WRITTEN)
MARKED = [name for name in KNOWN if name != "chatml"]


def test_these_are_all():
    assert sorted(FORMAT_MAPPING) == KNOWN


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_written_in_transformers_and_here(fast, name):
    setup_chat_format(None, fast, format=name)
    assert fast.apply_chat_template(TURNS, tokenize=False) == WRITTEN[name]
    assert render_chat(fast, TURNS).text == WRITTEN[name]
    prompt = fast.apply_chat_template(TURNS[:3], tokenize=False, add_generation_prompt=True)
    assert prompt.endswith(PROMPTS[name])
    assert WRITTEN[name].startswith(prompt)


@pytest.mark.parametrize("name", KNOWN)
def test_set_up_tokens_are_one_id_each_and_come_once(any_tokenizer, name):
    setup_chat_format(None, any_tokenizer, format=name)
    made = FORMAT_MAPPING[name]()
    tokens = [made.bos_token, made.eos_token, made.pad_token, *getattr(made, "other_tokens", ())]
    ids = any_tokenizer.convert_tokens_to_ids(tokens)
    assert len(set(ids)) == len(set(tokens))
    assert set(tokens) <= set(any_tokenizer.all_special_tokens)
    assert (any_tokenizer.bos_token, any_tokenizer.eos_token, any_tokenizer.pad_token) == (
        *tokens[:3],
    )
    plain = any_tokenizer("Hi")["input_ids"]
    assert any_tokenizer.bos_token_id not in plain
    chat = encode_chat(any_tokenizer, TURNS)
    for token, i in zip(tokens, ids, strict=True):
        assert chat.input_ids.count(i) == WRITTEN[name].count(token)


@pytest.mark.parametrize("name", MARKED)
def test_marks_choose_the_answer_and_its_end(fast, name):
    setup_chat_format(None, fast, format=name)
    encoded = fast.apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=True)
    chosen = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    text = fast.decode([token for token, mask in chosen if mask])
    end = fast.eos_token
    thought = "<think>\n\n</think>\n\n" if name == "qwen3" else ""
    assert text == f"Yes?{end}{thought}Bye.{end}"


@pytest.mark.parametrize("name", MARKED)
def test_contents_of_all_kinds(fast, name):
    setup_chat_format(None, fast, format=name)
    parts = [{"type": "text", "text": "Hi"}]
    turns = [{"role": "user", "content": parts}, *TURNS[1:]]
    assert fast.apply_chat_template(turns, tokenize=False) == WRITTEN[name]
    turns = [{"role": "user", "content": None}]
    empty = fast.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    assert fast.apply_chat_template(turns, tokenize=False) == empty
    for content in ({"a": 1}, 3, [{"type": "image"}]):
        with pytest.raises(Exception, match="text"):
            fast.apply_chat_template([{"role": "user", "content": content}], tokenize=False)


@pytest.mark.parametrize("name", MARKED)
def test_what_a_format_can_not_write_is_refused(fast, name):
    setup_chat_format(None, fast, format=name)
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    for turns, tools in [
        ([TURNS[0], calling], None),
        ([TURNS[0], {"role": "tool", "content": "4"}], None),
        (TURNS[:1], [{"type": "function", "function": {"name": "f", "parameters": {}}}]),
    ]:
        with pytest.raises(Exception, match=r"no way to write|by turns"):
            fast.apply_chat_template(turns, tools=tools, tokenize=False)


def test_gemma_has_no_system_message(fast):
    setup_chat_format(None, fast, format="gemma")
    for roles in (["system"], ["assistant"], ["user", "user"]):
        turns = [{"role": role, "content": "x"} for role in roles]
        with pytest.raises(Exception, match="no system message"):
            fast.apply_chat_template(turns, tokenize=False)


@pytest.mark.parametrize("tie", [True, False])
def test_a_model_gets_rows_for_all_tokens_of_a_format(fast, make_llama, tie):
    model, _, added = setup_chat_format(
        make_llama(325, tie), fast, format="llama3", return_added_ids=True
    )
    assert added == [325, 326, 327, 328, 329]
    assert model.get_input_embeddings().weight.shape[0] == 330
    ids = torch.tensor([encode_chat(fast, TURNS).input_ids])
    assert torch.isfinite(model(ids, labels=ids).loss)


@pytest.fixture
def formats(monkeypatch):
    for name in ("mine", "broken"):
        monkeypatch.delitem(FORMAT_MAPPING, name, raising=False)
    yield
    FORMAT_MAPPING.pop("mine", None)


@pytest.mark.usefixtures("formats")
def test_a_format_of_ones_own(byte_level):
    register_format("mine", lambda: ChatMlSpecialTokens(eos_token="<end>", pad_token="<fill>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level)
    setup_chat_format(None, tokenizer, format="mine")
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<end>", "<fill>")
    with pytest.raises(ValueError, match="already"):
        register_format("mine", ChatMlSpecialTokens)
    with pytest.raises(ValueError, match="already"):
        register_format("chatml", ChatMlSpecialTokens)
    with pytest.raises(ValueError, match="name=''"):
        register_format("", ChatMlSpecialTokens)
    with pytest.raises(ValueError, match="`pad_token`"):
        register_format("broken", lambda: ChatMlSpecialTokens(pad_token=""))
    with pytest.raises(ValueError, match="`bos_token`"):
        register_format("broken", object)
    assert "broken" not in FORMAT_MAPPING
