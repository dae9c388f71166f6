"""The package alone needs neither torch nor transformers."""

import subprocess
import sys

import trl_chatformat

WITHOUT = """
import sys

for name in ("torch", "transformers", "numpy"):
    sys.modules[name] = None  # importing it is an error

from trl_chatformat import ChatTokenizer, setup_chat_format

tokenizer = ChatTokenizer.from_directory(sys.argv[1])
model, tokenizer = setup_chat_format(None, tokenizer, resize_to_multiple_of=64)
assert model is None
tokenizer.save_pretrained(sys.argv[2])
ids = ChatTokenizer.from_directory(sys.argv[2]).encode("<|im_start|>user\\nHi<|im_end|>\\n")
assert ids.count(tokenizer.bos_token_id) == 1 == ids.count(tokenizer.eos_token_id)
print(tokenizer.decode(ids, skip_special_tokens=True))
"""


def test_a_folder_is_set_up_without_torch_and_transformers(byte_level, tmp_path):
    trl_chatformat.ChatTokenizer(byte_level).save_pretrained(tmp_path / "base")
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT, tmp_path / "base", tmp_path / "chat"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout == "user\nHi\n\n"


def test_the_public_names_are_there():
    assert set(trl_chatformat.__all__) == {
        "FORMAT_MAPPING",
        "ChatMlSpecialTokens",
        "ChatTokenizer",
        "EncodedChat",
        "RenderedChat",
        "clone_chat_template",
        "collate_chats",
        "encode_chat",
        "encode_chats",
        "encode_completions",
        "extend_chat",
        "is_prefix_stable",
        "prepare_tokenizer_files",
        "register_format",
        "render_chat",
        "setup_chat_format",
        "trainable_token_settings",
    }
    assert all(hasattr(trl_chatformat, name) for name in trl_chatformat.__all__)
