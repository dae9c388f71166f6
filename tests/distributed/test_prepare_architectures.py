"""References of several architectures on every engine, and what FSDP's settings mean for them."""

import accelerate
import pytest

from tools.rails.models import random_llama
from tools.rails.ranks import run_on_ranks

KINDS = [
    "llama",
    "tied llama",
    "gpt2",
    "opt-350m-like",
    "t5",
    "encoder-decoder",
    "vision-language",
    "mixture of experts",
]
# accelerate 1.6 has no meshes and sends rank 0's weights only from a GPU.
MODERN = hasattr(accelerate, "ParallelismConfig")


def make_model(kind):
    """Return a tiny random model of a real class, and its inputs."""
    import torch
    import transformers as tf

    torch.manual_seed(3)
    small = {
        "vocab_size": 99,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    if kind == "gpt2":
        model = tf.GPT2LMHeadModel(
            tf.GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=99, n_positions=32)
        )
    elif kind == "opt-350m-like":
        model = tf.OPTForCausalLM(
            tf.OPTConfig(
                vocab_size=99,
                hidden_size=32,
                word_embed_proj_dim=16,
                ffn_dim=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=32,
                do_layer_norm_before=False,
            )
        )
    elif kind == "t5":
        model = tf.T5ForConditionalGeneration(
            tf.T5Config(
                vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
                decoder_start_token_id=0,
            )
        )  # fmt: skip
    elif kind == "encoder-decoder":
        part = tf.BertConfig(**small, max_position_embeddings=32)
        config = tf.EncoderDecoderConfig.from_encoder_decoder_configs(part, part)
        config.decoder_start_token_id, config.pad_token_id = 1, 0
        model = tf.EncoderDecoderModel(config)
    elif kind == "vision-language":
        model = tf.LlavaForConditionalGeneration(
            tf.LlavaConfig(
                text_config=tf.LlamaConfig(**small),
                vision_config=tf.CLIPVisionConfig(
                    hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                    num_attention_heads=2, image_size=16, patch_size=8,
                ),
                image_token_index=98,
            )
        )  # fmt: skip
    elif kind == "mixture of experts":
        model = tf.MixtralForCausalLM(
            tf.MixtralConfig(
                **small, num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2
            )
        )
    else:
        model = random_llama(tie_word_embeddings=kind == "tied llama")
    ids = torch.arange(3, 23).reshape(2, 10)
    inputs = {"input_ids": ids, "labels": ids}
    if kind == "vision-language":
        image = torch.full((2, 4), 98)
        inputs = {key: torch.cat([image, value], dim=1) for key, value in inputs.items()}
        inputs["pixel_values"] = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)
    return model, inputs


def loss_of(model, inputs):
    import torch

    with torch.no_grad():
        return model(**inputs).loss.item()


def prepared(accelerator, kinds):
    """Prepare a copy of each kind of model; return its loss, where it is and what it holds."""
    from torch.distributed.fsdp import FSDPModule

    from trl_prepare import create_reference_model, prepare_reference_model

    outcomes = []
    for kind in kinds:
        model, inputs = make_model(kind)
        inputs = {name: value.to(accelerator.device) for name, value in inputs.items()}
        reference = prepare_reference_model(create_reference_model(model), accelerator)
        outcomes.append(
            {
                "losses": [loss_of(reference, inputs) for _ in range(2)],
                "layered": any(
                    type(module).__name__ in (model._no_split_modules or ())
                    for module in model.modules()
                ),
                "units": sum(isinstance(module, FSDPModule) for module in reference.modules()),
                "itself": type(reference) is type(model),
                "partitioned": all(hasattr(p, "ds_id") for p in reference.parameters()),
                "frozen": not any(p.requires_grad for p in reference.parameters()),
            }
        )
    return outcomes


@pytest.mark.parametrize("engine", ["single", "ddp", "zero2", "zero3", "fsdp1", "fsdp2"])
def test_references_of_eight_architectures_give_the_plain_models_losses(engine):
    expected = []
    for kind in KINDS:
        model, inputs = make_model(kind)
        expected.append(loss_of(model.eval(), inputs))
    for rank in run_on_ranks(prepared, engine=engine, kinds=KINDS):
        for kind, outcome, loss in zip(KINDS, rank, expected, strict=True):
            assert outcome["losses"] == pytest.approx([loss] * 2, rel=2e-5), kind
            assert outcome["frozen"]
            assert outcome["itself"] == (engine in ("single", "ddp"))  # no wrapper, no buckets
            assert outcome["partitioned"] == (engine == "zero3")
            # transformers 4.51 names no layers of a vision-language model.
            if engine == "fsdp2":
                assert outcome["units"] > 2 * outcome["layered"], kind
            else:
                assert outcome["units"] == 0
            assert outcome["layered"] or not MODERN


def with_fsdp_settings(accelerator, case):
    """Prepare a reference as a plugin with this setting wants it; say what became of it."""
    import torch
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy

    from trl_prepare import prepare_reference_model

    plugin = accelerator.state.fsdp_plugin
    version = plugin.fsdp_version
    model = random_llama()
    empty = False
    if case == "rank 0 has the weights":
        plugin.cpu_ram_efficient_loading = True
        empty = accelerator.process_index != 0
    elif case == "offload":
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False) if version == 2 else CPUOffload()
    elif case == "ignored modules":
        plugin.ignored_modules = r"model\.layers\.0\.mlp"
    if empty:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    reference = prepare_reference_model(model, accelerator)
    ids = torch.arange(20, device=accelerator.device).reshape(2, 10)
    loss = loss_of(reference, {"input_ids": ids, "labels": ids})
    for module in reference.modules():
        getattr(module, "reshard", lambda: None)()
    mlp = [p for name, p in reference.named_parameters() if "layers.0.mlp" in name]
    return loss, [hasattr(p, "to_local") for p in mlp], sum(p.requires_grad for p in mlp)


@pytest.mark.parametrize(
    ("engine", "case"),
    [
        ("fsdp1", "offload"),
        ("fsdp1", "ignored modules"),
        *([("fsdp2", "rank 0 has the weights")] if MODERN else []),  # FSDP1: only from a GPU
        ("fsdp2", "offload"),
        ("fsdp2", "ignored modules"),
    ],
)
def test_fsdp_settings_hold_for_references(engine, case):
    import torch

    ids = torch.arange(20).reshape(2, 10)
    expected = loss_of(random_llama().eval(), {"input_ids": ids, "labels": ids})
    for loss, sharded, trainable in run_on_ranks(with_fsdp_settings, engine=engine, case=case):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert trainable == 0
        if engine == "fsdp2" and case != "ignored modules":
            assert all(sharded)


def on_a_mesh(accelerator):
    """Shard over two ranks, replicate over two: what a parallelism config asks for."""
    import torch
    from accelerate import ParallelismConfig

    from trl_prepare import create_reference_model, prepare_reference_model

    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    accelerator.state.parallelism_config = config
    accelerator.state.device_mesh = config.build_device_mesh("cpu")
    policy = random_llama(seed=1)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    reference = prepare_reference_model(random_llama(), accelerator)
    copied = create_reference_model(policy)
    ids = torch.arange(20).reshape(2, 10)
    inputs = {"input_ids": ids, "labels": ids}
    losses = [loss_of(model, inputs) for model in (reference, copied, policy)]
    for model in (reference, copied):
        for module in model.modules():
            getattr(module, "reshard", lambda: None)()
    layouts = {
        (p.device_mesh.shape, str(p.placements))
        for model in (reference, copied)
        for p in model.parameters()
    }
    return losses, sorted(layouts)


if MODERN:

    def test_a_hybrid_mesh_is_the_references_too():
        import torch

        ids = torch.arange(20).reshape(2, 10)
        inputs = {"input_ids": ids, "labels": ids}
        plain, policy = (
            loss_of(random_llama().eval(), inputs),
            loss_of(random_llama(1).eval(), inputs),
        )
        for losses, layouts in run_on_ranks(on_a_mesh, engine="fsdp2", processes=4):
            assert losses == pytest.approx([plain, policy, policy], rel=1e-5)
            assert layouts == [((2, 2), "(Replicate(), Shard(dim=0))")]
