"""Names that other libraries keep private, each tested to be there still."""

# transformers 4.51 to 5.24: what accelerate reads on a model to shard it.
READ_BY_ACCELERATE = ("_no_split_modules", "_tied_weights_keys")

# transformers 4.51 to 5.24: by configuration class, the model class that an auto class loads.
MODEL_MAPPING = "_model_mapping"

# DeepSpeed 0.16.4 to 0.19.8: set on each parameter that ZeRO-3 shards.
ZERO3_PARAMETER_MARK = "ds_id"

# torch 2.6 to 2.13: what FullyShardedDataParallel calls the module that it wraps.
FSDP1_INNER = "_fsdp_wrapped_module"
