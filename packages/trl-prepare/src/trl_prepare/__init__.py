"""Reference models: created, and prepared for DeepSpeed and FSDP."""
