"""Slow tokenizers of transformers, on a real SentencePiece model and others."""

import random
from functools import partial

import real_data
import transformers

from trl_chatformat import encode_chat

TEMPLATE = (
    "{{ bos_token or '' }}{% for message in messages %}"
    "{{ '<' + message['role'] + '>' + message['content'] + eos_token + '\n' }}{% endfor %}"
)
# Each is slow in at least one of the versions that are tested.
SENTENCEPIECE = (
    *("BertGenerationTokenizer", "CamembertTokenizer", "GPTSw3Tokenizer", "LlamaTokenizer"),
    *("SpeechT5Tokenizer", "T5Tokenizer"),
)
WORDS = ("hello", " ", "\n", "row", "é", "☃", "x ", " y", "</s", "<s", "> ", "  ")
VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "##x", "x", "row", "<", ">")


def make_all(folder):
    model = str(real_data.fetch("mistral-common") / "tokenizer.model.v1")
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(VOCABULARY))
    makers = {
        name: partial(getattr(transformers, name), model)
        for name in SENTENCEPIECE
        if hasattr(transformers, name)
    }
    makers["BertTokenizer"] = partial(
        transformers.BertTokenizer, str(vocabulary), bos_token="[CLS]", eos_token="[SEP]"
    )
    makers["ByT5Tokenizer"] = partial(transformers.ByT5Tokenizer, extra_ids=3)
    for name, make in makers.items():
        try:
            tokenizer = make()
        except (ImportError, TypeError, ValueError):
            continue  # fast in this version, and made in other ways
        if not tokenizer.is_fast:
            tokenizer.chat_template = TEMPLATE
            yield name, tokenizer


def test_slow_tokenizers_are_safe_and_exact(tmp_path):
    tokenizers = dict(make_all(tmp_path))
    assert len(tokenizers) >= 4
    for name, tokenizer in tokenizers.items():
        check(name, tokenizer)


def check(name, tokenizer):
    generator = random.Random(0)
    control = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    exact = neutralised = 0
    for number in range(100):
        words = WORDS + tuple(tokenizer.all_special_tokens) * (number % 2)
        chat = [
            {"role": role, "content": "".join(generator.choices(words, k=generator.randint(0, 8)))}
            for role in ("user", "assistant")
        ]
        encoded = encode_chat(tokenizer, chat)
        twin = encode_chat(tokenizer, [message | {"content": "x"} for message in chat])
        here, there = (
            [token for token in ids if token in control]
            for ids in (encoded.input_ids, twin.input_ids)
        )
        assert here == there, (name, chat)
        neutralised += len(encoded.neutralised)
        if not encoded.neutralised:
            exact += 1
            text = tokenizer.apply_chat_template(chat, tokenize=False)
            plain = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert encoded.input_ids == plain, (name, chat)
    assert exact > 40
    assert neutralised > 40


def test_masks_of_slow_tokenizers_choose_the_message_and_its_stop_token(tmp_path):
    for name, tokenizer in make_all(tmp_path):
        chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "row x"}]
        encoded = encode_chat(tokenizer, chat)
        chosen = zip(encoded.input_ids, encoded.assistant_masks, strict=True)
        ids = [token for token, mask in chosen if mask]
        assert ids[-1] == tokenizer.eos_token_id, name
        assert encoded.assistant_masks.count(1) == encoded.message_ids.count(1), name
