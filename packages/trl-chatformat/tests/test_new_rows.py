"""Which values rows of new tokens get."""

import pytest
import torch
from transformers import LlamaForCausalLM

from trl_chatformat import setup_chat_format
from trl_chatformat._transformers_private import grows_plainly
from trl_chatformat.embeddings import average_rows, make_rows, sample_rows


def test_models_without_a_way_of_their_own_grow_plainly(make_llama, encoder_decoder):
    assert LlamaForCausalLM._resize_token_embeddings
    assert grows_plainly(make_llama())
    assert not grows_plainly(encoder_decoder)  # its bias on the logits grows too


@pytest.mark.parametrize("untrained", [0.0, 100.0])
def test_rows_of_one_value_do_not_count(untrained):
    torch.manual_seed(0)
    trained = 3 + 0.1 * torch.randn(500, 16)
    trained[100:300] = untrained
    known = torch.cat([trained[:100], trained[300:]])
    assert torch.allclose(average_rows(trained), known.mean(0), atol=1e-5)
    drawn = sample_rows(trained, 4000)
    assert torch.allclose(drawn.mean(0), known.mean(0), atol=0.01)
    assert torch.allclose(drawn.T.cov(), known.T.cov(), atol=2e-3)


def test_a_chosen_part_of_many_rows_stands_for_all():
    torch.manual_seed(0)
    mixing = torch.randn(8, 8)
    trained = torch.randn(50_000, 8) @ mixing + 5 * torch.randn(8)
    drawn = torch.cat([sample_rows(trained, 200) for _ in range(50)])
    covariance = trained.T.cov()
    deviations = covariance.diagonal().sqrt()
    assert ((drawn.mean(0) - trained.mean(0)).abs() < 0.05 * deviations).all()
    allowed = 0.06 * deviations[:, None] * deviations
    assert ((drawn.T.cov() - covariance).abs() < allowed).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spread", [0.0, 1e-6, 1.0])
def test_sampled_rows_differ_in_the_stored_dtype(dtype, spread):
    torch.manual_seed(0)
    row = torch.linspace(1, 2, 8)
    trained = (row + spread * torch.randn(100, 8)).to(dtype)
    rows = make_rows(trained, 50, "sample")
    assert rows.dtype == dtype
    assert len(torch.unique(rows, dim=0)) == 50
    assert (rows.float() - row).abs().max() < 0.2 + 5 * spread


@pytest.mark.parametrize("trained", [torch.zeros(10, 4), torch.zeros(0, 4)])
def test_where_nothing_is_trained_rows_are_small_and_differ(trained):
    rows = make_rows(trained, 3, "sample")
    assert len(torch.unique(rows, dim=0)) == 3
    assert rows.abs().max() < 0.2


def test_a_broken_row_does_not_spread():
    trained = torch.randn(50, 4)
    trained[7] = float("nan")
    assert make_rows(trained, 3, "sample").isfinite().all()
    assert make_rows(trained, 3, "mean").isfinite().all()


def test_rows_of_no_token_take_little_of_a_prediction(make_llama, fast):
    torch.manual_seed(0)
    model = make_llama(325, tie=False)
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight.normal_()
    _, _, added = setup_chat_format(model, fast, resize_to_multiple_of=512, return_added_ids=True)
    assert len(head.weight) == 512
    probabilities = (torch.randn(64, 32) @ head.weight.T).softmax(dim=-1)
    padding = [i for i in range(325, 512) if i not in added]
    # Rows like the trained ones would take 185 of 512 parts.
    assert probabilities[:, padding].sum(dim=-1).mean() < 0.01
    assert head.weight[added].norm(dim=1).min() > 3  # of about 5.7
    assert len(torch.unique(head.weight[325:], dim=0)) == 512 - 325
