"""Prompts with their completions, or with chosen and rejected ones."""

import pytest

from trl_chatformat import ChatTokenizer, encode_chat, encode_completions

TEMPLATE = (
    "{% for message in messages %}{{ '<tool>' + message['role'] + '\n' + message['content'] }}"
    "{% if not (loop.last and continue_final_message) %}{{ eos_token + '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<tool>assistant\n' }}{% endif %}"
)
PROMPT = [{"role": "user", "content": "row"}]
ANSWERS = [
    [{"role": "assistant", "content": text}] for text in ("The quick fox", "\ndog<|endoftext|>")
]
PAIR = {"prompt": PROMPT, "chosen": ANSWERS[0], "rejected": ANSWERS[1]}


@pytest.fixture
def tokenizer(any_tokenizer):
    any_tokenizer.chat_template = TEMPLATE
    any_tokenizer.add_tokens(["<tool>"], special_tokens=True)
    return any_tokenizer


def test_prompt_and_completion_are_the_ids_of_the_whole(tokenizer):
    rows = [{"prompt": PROMPT, "completion": answer} for answer in ANSWERS]
    columns = encode_completions(tokenizer, rows)
    for number, answer in enumerate(ANSWERS):
        whole = encode_chat(tokenizer, PROMPT + answer)
        prompt = columns["prompt_ids"][number]
        completion = columns["completion_ids"][number]
        assert prompt + completion == whole.input_ids
        assert columns["completion_mask"][number] == whole.assistant_masks[len(prompt) :]
        asked = encode_chat(tokenizer, PROMPT, add_generation_prompt=True).input_ids
        assert asked[: len(prompt)] == prompt
        assert len(asked) - len(prompt) <= 1  # a newline may have merged
    assert set(columns) == {
        "prompt_ids",
        "completion_ids",
        "completion_mask",
        "neutralised",
        "truncated",
    }


def test_pairs_have_one_prompt(tokenizer):
    columns = encode_completions(tokenizer, [PAIR])
    for name, answer in zip(("chosen", "rejected"), ANSWERS, strict=True):
        whole = encode_chat(tokenizer, PROMPT + answer)
        prompt = columns["prompt_ids"][0]
        assert prompt + columns[f"{name}_ids"][0] == whole.input_ids
        assert columns[f"{name}_mask"][0] == whole.assistant_masks[len(prompt) :]


def test_batches_of_columns_are_taken_and_tools_are_passed_on(byte_level):
    template = "{{ (tools or []) | length }}" + TEMPLATE
    tokenizer = ChatTokenizer(byte_level, {"eos_token": "<|endoftext|>"}, template)
    rows = [PAIR | {"tools": [{"name": "f"}]}, PAIR | {"tools": None}]
    columns = encode_completions(tokenizer, rows)
    assert encode_completions(tokenizer, {k: [row[k] for row in rows] for k in rows[0]}) == columns
    assert [tokenizer.decode(ids)[0] for ids in columns["prompt_ids"]] == ["1", "0"]


def test_a_completion_may_go_on_with_the_last_turn(byte_level):
    tokenizer = ChatTokenizer(byte_level, {"eos_token": "<|endoftext|>"}, TEMPLATE)
    prompt = [*PROMPT, {"role": "assistant", "content": "The"}]
    answer = [{"role": "user", "content": "dog"}]
    columns = encode_completions(tokenizer, [{"prompt": prompt, "completion": answer}])
    assert tokenizer.decode(columns["prompt_ids"][0]).endswith("assistant\nThe<|endoftext|>\n")


def test_text_gets_beginning_and_eos_tokens_once(llama_like):
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = ChatTokenizer(llama_like, names)
    rows = [{"prompt": "The quick", "completion": " fox"}]
    [prompt], [ids], [mask] = (
        encode_completions(tokenizer, rows)[name]
        for name in ("prompt_ids", "completion_ids", "completion_mask")
    )
    assert prompt[0] == tokenizer.bos_token_id
    assert ids[-1] == tokenizer.eos_token_id
    assert mask == [1] * len(ids)
    assert [*prompt, *ids] == [*tokenizer.encode("The quick fox"), tokenizer.eos_token_id]


def test_eos_at_the_end_of_trusted_text_is_not_written_again(byte_level):
    tokenizer = ChatTokenizer(byte_level, {"eos_token": "<|endoftext|>"})
    rows = [{"prompt": "a<tool>", "completion": "b<|endoftext|>"}]
    ids = encode_completions(tokenizer, rows, trust=lambda *_: True)["completion_ids"][0]
    assert ids.count(tokenizer.eos_token_id) == 1
    columns = encode_completions(tokenizer, rows)
    assert columns["completion_ids"][0].count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(columns["completion_ids"][0]) == "b<|endoftext|><|endoftext|>"
    assert columns["neutralised"] == [2]


def test_a_token_across_the_border_is_the_completions(byte_level):
    tokenizer = ChatTokenizer(byte_level, {"eos_token": "<|endoftext|>"})
    columns = encode_completions(tokenizer, [{"prompt": "the qui", "completion": "ck"}])
    prompt, answer = columns["prompt_ids"][0], columns["completion_ids"][0]
    assert [*prompt, *answer] == [*tokenizer.encode("the quick"), tokenizer.eos_token_id]
    assert tokenizer.encode("the qui")[: len(prompt)] == prompt
    assert len(prompt) < len(tokenizer.encode("the qui"))


@pytest.mark.parametrize("side", ["left", "right", "left-inside", "right-inside"])
def test_what_is_cut_is_cut_from_the_whole(tokenizer, side):
    whole = encode_completions(tokenizer, [PAIR])
    total = sum(len(column[0]) for name, column in whole.items() if name.endswith("_ids"))
    longest = len(whole["prompt_ids"][0]) + len(whole["rejected_ids"][0])
    for length in range(1, longest + 1):
        part = encode_completions(tokenizer, [PAIR], max_length=length, truncation_side=side)
        sizes = {name: len(column[0]) for name, column in part.items() if name.endswith("_ids")}
        assert total - sum(sizes.values()) == part["truncated"][0]
        for name in ("chosen", "rejected"):
            assert sizes["prompt_ids"] + sizes[f"{name}_ids"] <= length
            ids, mask = part[f"{name}_ids"][0], part[f"{name}_mask"][0]
            start = 0 if side.startswith("right") else len(whole[f"{name}_ids"][0]) - len(ids)
            assert ids == whole[f"{name}_ids"][0][start : start + len(ids)]
            assert mask == whole[f"{name}_mask"][0][start : start + len(ids)]


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([{"prompt": "a"}], "expected to have `prompt` and either `completion`"),
        ([{"completion": "a"}], "expected to have `prompt` and either `completion`"),
        ([{"prompt": "a", "completion": PROMPT}], "must both be text"),
        (
            [{"prompt": "a", "completion": "b"}, {"prompt": "a", "chosen": "b", "rejected": "c"}],
            "encode them apart",
        ),
    ],
)
def test_rows_that_cannot_be_understood_are_refused(byte_level, rows, complaint):
    tokenizer = ChatTokenizer(byte_level, {"eos_token": "<|endoftext|>"}, TEMPLATE)
    with pytest.raises(ValueError, match=complaint):
        encode_completions(tokenizer, rows)
