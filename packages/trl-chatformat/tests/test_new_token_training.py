"""With the settings for PEFT, new rows are trained and old ones aren't."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from trl_chatformat import setup_chat_format, trainable_token_settings


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("old_rows", [325, 512])
def test_just_the_new_rows_are_trained(fast, make_llama, tie, old_rows):
    model, _, added = setup_chat_format(make_llama(old_rows, tie), fast, return_added_ids=True)
    config = LoraConfig(
        target_modules=["q_proj"],
        task_type="CAUSAL_LM",
        **trainable_token_settings(model, added),
    )
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    before = [layer.weight.detach().clone() for layer in layers]
    adapted = get_peft_model(model, config)
    optimizer = torch.optim.SGD(
        [parameter for parameter in adapted.parameters() if parameter.requires_grad], lr=1.0
    )
    ids = torch.tensor([[added[0], 5, added[1], 6, added[0]]])
    first = adapted(ids, labels=ids).loss
    first.backward()
    optimizer.step()
    assert adapted(ids, labels=ids).loss < first
    merged = adapted.merge_and_unload()
    after = [merged.get_input_embeddings().weight, merged.get_output_embeddings().weight]
    for old, new in zip(before, after, strict=True):
        changed = (old != new).any(dim=1).nonzero().flatten().tolist()
        assert changed == added
    assert torch.equal(*after) == tie


def test_what_can_not_be_trained_is_refused(fast, make_llama):
    model = make_llama(325)
    assert trainable_token_settings(model, []) == {}
    for ids in ([-1], [325], [3, 400]):
        with pytest.raises(ValueError, match="325 rows"):
            trainable_token_settings(model, ids)
    with pytest.raises(TypeError, match="get_input_embeddings"):
        trainable_token_settings(torch.nn, [1])
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="adapters already"):
        trainable_token_settings(adapted, [1])
