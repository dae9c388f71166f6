"""Causal and sequence-to-sequence language models with a value head."""
