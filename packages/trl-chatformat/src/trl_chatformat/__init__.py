"""Chat formats, templates, special tokens and embedding growth, without torch or transformers."""
