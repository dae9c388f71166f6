"""Chat formats, templates, special tokens and embedding growth, without torch or transformers."""

from trl_chatformat.formats import FORMAT_MAPPING
from trl_chatformat.setup_format import setup_chat_format
from trl_chatformat.special_tokens import ChatMlSpecialTokens
from trl_chatformat.tokenizer_files import ChatTokenizer

__all__ = ["FORMAT_MAPPING", "ChatMlSpecialTokens", "ChatTokenizer", "setup_chat_format"]
