"""The ChatML format does what TRL 0.18.2's does, wherever that is right."""

import pytest

from tools.rails.peers import find, run_both

pytestmark = pytest.mark.full

CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": "  spaces, 'quotes' & <b>tags</b>, ümläute, 日本語\n\n"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "{{ not a template }} {% if %}"},
    ],
    [{"role": "tool", "content": "any role"}, {"role": "assistant", "content": "x" * 1000}],
]


def make_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["The quick brown fox jumps over the lazy dog."] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


def special_tokens(library):
    tokens = find(library, "ChatMlSpecialTokens")()
    other = find(library, "ChatMlSpecialTokens")(bos_token="<s>", eos_token="</s>")
    names = ("bos_token", "eos_token", "pad_token", "system", "user", "assistant")
    formats = find(library, "FORMAT_MAPPING")
    return [[getattr(one, name) for name in names] for one in (tokens, other, formats["chatml"]())]


def rendered(library, conversations, prompt, bos_token="<|im_start|>"):
    tokenizer = make_tokenizer()
    tokens = find(library, "ChatMlSpecialTokens")(bos_token=bos_token)
    tokenizer.chat_template = tokens.chat_template
    return [
        tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=prompt)
        for one in conversations
    ]


def set_up(library, tie, multiple):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        tie_word_embeddings=tie,
    )
    model = LlamaForCausalLM(config)
    old = len(tokenizer)
    same = find(library, "setup_chat_format")(model, tokenizer, resize_to_multiple_of=multiple)
    text = tokenizer.apply_chat_template(CONVERSATIONS[1], tokenize=False)
    ids = ("pad_token_id", "bos_token_id", "eos_token_id")
    return {
        "returned": same[0] is model and same[1] is tokenizer,
        "special tokens": tokenizer.special_tokens_map,
        "all special ids": sorted(tokenizer.all_special_ids),
        "length": len(tokenizer),
        "vocabulary": tokenizer.get_vocab(),
        "text": text,
        "encoded": tokenizer(text)["input_ids"],
        "decoded": tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True),
        "config": [getattr(model.config, name) for name in ids],
        "generation": [getattr(model.generation_config, name) for name in ids],
        "vocab_size": model.config.vocab_size,
        "rows": [tuple(p.shape) for p in model.parameters()],
        "old rows": model.get_input_embeddings().weight[:old].detach(),
        "old outputs": model.get_output_embeddings().weight[:old].detach(),
        "tied": model.get_output_embeddings().weight is model.get_input_embeddings().weight,
    }


def error(library, chat_template, format):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = chat_template
    try:
        find(library, "setup_chat_format")(None, tokenizer, format=format)
    except Exception as raised:
        return type(raised).__name__
    return None


def test_the_special_tokens_are_trls():
    ours, theirs = run_both(special_tokens)
    assert ours == theirs


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("bos_token", ["<|im_start|>", "<s>"])
def test_plain_conversations_render_to_the_same_bytes(prompt, bos_token):
    arguments = {"conversations": CONVERSATIONS, "prompt": prompt, "bos_token": bos_token}
    ours, theirs = run_both(rendered, **arguments)
    assert [text.encode() for text in ours] == [text.encode() for text in theirs]
    assert prompt or ours[0] == f"{bos_token}user\nHi<|im_end|>\n"


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("multiple", [None, 64])
def test_a_plain_tokenizer_and_model_are_set_up_alike(tie, multiple):
    ours, theirs = run_both(set_up, tie=tie, multiple=multiple)
    for rows in ("old rows", "old outputs"):
        assert ours.pop(rows).equal(theirs.pop(rows)), rows
    assert ours == theirs


@pytest.mark.parametrize(("template", "format"), [("x", "chatml"), (None, "unknown")])
def test_the_same_kind_of_error_is_raised(template, format):
    ours, theirs = run_both(error, chat_template=template, format=format)
    assert ours == theirs == "ValueError"
