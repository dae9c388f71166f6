"""Chat formats and templates, and chats encoded with exact masks, without torch or transformers."""

from trl_chatformat.cloning import clone_chat_template
from trl_chatformat.collating import collate_chats
from trl_chatformat.completions import encode_completions
from trl_chatformat.encoding import EncodedChat, encode_chat, encode_chats
from trl_chatformat.extending import extend_chat, is_prefix_stable
from trl_chatformat.formats import FORMAT_MAPPING, register_format
from trl_chatformat.new_token_training import trainable_token_settings
from trl_chatformat.prepared_files import prepare_tokenizer_files
from trl_chatformat.rendering import RenderedChat, render_chat
from trl_chatformat.setup_format import setup_chat_format
from trl_chatformat.special_tokens import ChatMlSpecialTokens
from trl_chatformat.tokenizer_files import ChatTokenizer

__all__ = [
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
]
