"""Chat formats on models that `deepspeed.zero.Init` has partitioned over two ranks."""

import pytest

from tools.rails.models import random_llama
from tools.rails.ranks import run_on_ranks


def make_tokenizer():
    from tokenizers import Tokenizer, models

    from trl_chatformat import ChatTokenizer

    return ChatTokenizer(Tokenizer(models.WordLevel({f"w{i}": i for i in range(90)}, "w0")))


def whole(model):
    import deepspeed

    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def set_up(accelerator, tied, multiple, vocab_size):
    import deepspeed
    import torch

    from trl_chatformat import setup_chat_format

    config = accelerator.state.deepspeed_plugin.deepspeed_config
    settings = {"tie_word_embeddings": tied, "vocab_size": vocab_size}
    before = {n: p.detach().clone() for n, p in random_llama(**settings).named_parameters()}
    model = random_llama(**settings)
    deepspeed.zero.Init(module=model, config_dict_or_path=config)
    torch.manual_seed(accelerator.process_index)  # rows must be equal all the same
    tokenizer = make_tokenizer()
    _, _, added = setup_chat_format(
        model, tokenizer, resize_to_multiple_of=multiple, return_added_ids=True
    )
    after = whole(model)
    kept = all(
        torch.equal(after[name][: min(len(value), 90)], value[:90])
        for name, value in before.items()
        if "embed_tokens" in name or "lm_head" in name
    ) and all(
        torch.equal(after[name], value)
        for name, value in before.items()
        if "embed_tokens" not in name and "lm_head" not in name
    )
    new = after["model.embed_tokens.weight"][added]
    facts = {
        "added": added,
        "rows": {name: len(v) for name, v in after.items() if "embed" in name or "lm_head" in name},
        "kept": kept,
        "different": not torch.equal(new[0], new[1]) and new.abs().min().item() > 0,
        "checksum": new.sum().item(),
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "partitioned": all(p.numel() == 0 for p in model.parameters()),
        "vocab_size": model.config.vocab_size,
        "eos": model.config.eos_token_id,
    }
    engine, optimizer = accelerator.prepare(
        model.train(), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    ids = torch.tensor([[1, *added, 2, *added]], device=accelerator.device)
    losses = []
    for _ in range(3):
        loss = engine(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    trained = whole(engine.module)["model.embed_tokens.weight"][added]
    try:
        setup_chat_format(model, make_tokenizer())
        refused = None
    except ValueError as error:
        refused = str(error)
    return facts | {
        "losses": losses,
        "trains": not torch.equal(trained, new),
        "refused": refused,
    }


@pytest.mark.parametrize(
    ("tied", "multiple", "vocab_size", "rows"),
    [
        (False, None, 90, 92),
        (True, None, 90, 92),
        (False, 64, 90, 128),
        (True, None, 99, 99),  # there is room already
        (False, None, 91, 92),
    ],
)
def test_new_rows_are_the_same_on_all_ranks_and_train(tied, multiple, vocab_size, rows):
    ranks = run_on_ranks(
        set_up, engine="zero3", tied=tied, multiple=multiple, vocab_size=vocab_size
    )
    assert ranks[0]["checksum"] == ranks[1]["checksum"]
    for rank in ranks:
        assert rank["added"] == [90, 91]
        assert set(rank["rows"].values()) == {rows}
        assert rank["kept"]
        assert rank["different"]
        assert rank["tied"] == tied
        assert rank["partitioned"]
        assert (rank["vocab_size"], rank["eos"]) == (rows, 91)
        assert rank["trains"]
        assert rank["losses"][2] < rank["losses"][0]
        assert "A DeepSpeed engine has this model already" in rank["refused"]
