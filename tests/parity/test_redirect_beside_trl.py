"""A redirected function returns and trains as through TRL's `_ForwardRedirection`."""

import pytest

from tools.rails.peers import find, run_both

pytestmark = pytest.mark.full


def redirected(accelerator, library):
    import torch
    from torch import nn

    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    outer = accelerator.prepare(inner)
    told = []

    class Telling(find(library, "_ForwardRedirection")):
        def on_after_inner_forward(self, wrapper_module, original_module):
            told.append(("inner", wrapper_module is outer, original_module is inner))

        def on_after_outer_forward(self, wrapper_module, original_module):
            told.append(("outer", wrapper_module is outer, original_module is inner))

    def loss_of(x, *, weight):
        told.append(("function",))
        return inner(x).square().mean() * weight + inner(2 * x).mean(), "more"

    torch.manual_seed(accelerator.process_index)
    loss, more = Telling()(outer, inner, loss_of, torch.randn(3, 4), weight=2.0)
    accelerator.backward(loss)
    after = outer(torch.ones(1, 4)).item()
    return loss.item(), more, [p.grad for p in inner.parameters()], told, after


@pytest.mark.parametrize("engine", ["single", "ddp"])
def test_result_gradients_and_callbacks_are_trls(engine):
    ours, theirs = run_both(redirected, engine=engine)
    gradients, their_gradients = ours[2], theirs[2]
    assert len(gradients) == 4
    assert all(one.equal(other) for one, other in zip(gradients, their_gradients, strict=True))
    assert ours[:2] + ours[3:] == theirs[:2] + theirs[3:]
    assert [step[0] for step in ours[3]] == ["function", "inner", "outer"]


def faults(library):
    """What is wrong after three calls: after a failure, after success, and after no inner call."""
    import torch
    from torch import nn

    redirection = find(library, "_ForwardRedirection")()

    class Outer(nn.Module):
        def __init__(self, inner, what):
            super().__init__()
            self.inner, self.what = inner, what

        def forward(self, x):
            if self.what == "fail":
                raise KeyError
            return self.inner(x) if self.what == "call" else x

    found = {}
    for what in ("fail", "call", "ignore"):
        inner = nn.Identity()
        try:
            redirection(Outer(inner, what), inner, lambda x: -x, torch.ones(1))
            error = None
        except Exception as raised:
            error = type(raised).__name__
        found[what] = (error, "forward" in vars(inner), inner(torch.ones(1)).item())
    return found


def test_what_trl_leaves_behind_is_gone_here():
    ours, theirs = run_both(faults)
    assert ours == {
        "fail": ("KeyError", False, 1.0),
        "call": (None, False, 1.0),
        "ignore": ("RuntimeError", False, 1.0),
    }
    assert theirs == {
        "fail": ("KeyError", True, -1.0),
        "call": (None, True, 1.0),
        "ignore": (None, True, -1.0),
    }
