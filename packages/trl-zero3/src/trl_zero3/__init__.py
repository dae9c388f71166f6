"""DeepSpeed ZeRO-3 hooks, and any wrapped model unwrapped for generation."""
