"""What a redirected call runs, and what it leaves behind."""

import inspect
import threading
import types
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import trl_redirect
from trl_redirect import ForwardRedirection

redirect = ForwardRedirection()


class Double(nn.Module):
    """Returns twice its input, so that a real forward and a function's result can't be mistaken."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x, shift=0.0):
        return self.scale * x + shift


class Wrapper(nn.Module):
    """Calls the inner module `times` times and raises where it is told to."""

    def __init__(self, inner, times=1, fail=None):
        super().__init__()
        self.inner, self.times, self.fail = inner, times, fail

    def forward(self, *args, **kwargs):
        if self.fail == "before":
            raise KeyboardInterrupt
        results = [self.inner(*args, **kwargs) for _ in range(self.times)]
        if self.fail == "after":
            raise KeyboardInterrupt
        return results[0] if self.times == 1 else results


@pytest.fixture
def model():
    return Double()


@pytest.fixture
def x():
    return torch.tensor([1.0, 3.0])


def square(x):
    return x * x


def test_runs_the_function_with_the_arguments_and_returns_its_result(model, x):
    result = redirect(Wrapper(model), model, lambda x, power: x**power, x, power=3)
    assert torch.equal(result, x**3)


def test_leaves_no_attribute_on_success(model, x):
    before = dict(model.__dict__)
    redirect(Wrapper(model), model, square, x)
    assert model.__dict__ == before
    assert torch.equal(model(x), 2 * x)


@pytest.mark.parametrize("fail", ["before", "after"])
def test_restores_forward_when_the_wrapper_raises(model, x, fail):
    wrapper = Wrapper(model, fail=fail)
    with pytest.raises(KeyboardInterrupt):
        redirect(wrapper, model, square, x)
    assert "forward" not in model.__dict__
    wrapper.fail = None
    assert torch.equal(wrapper(x), 2 * x)


def test_restores_forward_when_the_function_raises(model, x):
    def fail(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        redirect(Wrapper(model), model, fail, x)
    assert "forward" not in model.__dict__
    assert torch.equal(model(x), 2 * x)


@pytest.mark.parametrize("fail", [None, "before"])
def test_a_forward_set_on_the_instance_comes_back(model, x, fail):
    own = types.MethodType(lambda self, x: -x, model)
    model.forward = own
    seen = []
    try:
        redirect(Wrapper(model, fail=fail), model, lambda x: seen.append(model(x)), x)
    except KeyboardInterrupt:
        assert fail == "before"
    else:
        assert torch.equal(seen[0], -x)  # the function, too, calls the user's forward
    assert model.__dict__["forward"] is own


def test_a_forward_set_by_the_function_stays(model, x):
    own = types.MethodType(lambda self, x: -x, model)

    def patch(x):
        model.forward = own

    redirect(Wrapper(model), model, patch, x)
    assert model.__dict__["forward"] is own


def test_the_function_may_call_the_model_and_the_wrapper(model, x):
    wrapper = Wrapper(model)
    result = redirect(wrapper, model, lambda x: model(x) + wrapper(x), x)
    assert torch.equal(result, 4 * x)


def test_the_function_sees_the_real_forward(model, x):
    seen = []
    redirect(Wrapper(model), model, lambda x: seen.append(inspect.signature(model.forward)), x)
    assert list(seen[0].parameters) == ["x", "shift"]


def test_the_function_may_redirect_again(model, x):
    wrapper = Wrapper(model)
    result = redirect(wrapper, model, lambda x: redirect(wrapper, model, square, x) + model(x), x)
    assert torch.equal(result, x * x + 2 * x)
    assert "forward" not in model.__dict__


def test_a_wrapper_may_redirect_before_it_calls_the_module(model, x):
    class Redirecting(Wrapper):
        def forward(self, x):
            return redirect(self.inner, self.inner, square, x), self.inner(x)

    inner, outer = redirect(Redirecting(model), model, lambda x: x + 1, x)
    assert torch.equal(inner, x * x)
    assert torch.equal(outer, x + 1)


def test_first_inner_call_runs_the_function_and_later_ones_the_real_forward(model, x):
    first, second = redirect(Wrapper(model, times=2), model, square, x)
    assert torch.equal(first, x * x)
    assert torch.equal(second, 2 * x)


def test_the_wrapper_may_be_the_module_itself_and_its_hooks_run(model, x):
    model.register_forward_hook(lambda module, args, output: output + 100)
    assert torch.equal(redirect(model, model, square, x), x * x + 100)


def test_a_wrapper_that_never_calls_the_module_is_an_error(model, x):
    with pytest.raises(RuntimeError, match="original_module \\(Double\\) was not reached"):
        redirect(Wrapper(Double()), model, square, x)
    assert "forward" not in model.__dict__


@pytest.mark.parametrize(
    ("position", "name"), [(0, "wrapper_module"), (1, "original_module"), (2, "method")]
)
def test_arguments_are_checked_before_anything_is_called(model, x, position, name):
    arguments = [Wrapper(model, fail="before"), model, square]
    arguments[position] = "no module"
    with pytest.raises(TypeError, match=name):
        redirect(*arguments, x)
    assert "forward" not in model.__dict__


def test_an_activation_checkpoint_wrapper_is_refused(model, x):
    with pytest.raises(ValueError, match="activation-checkpoint wrapper"):
        redirect(checkpoint_wrapper(model), model, square, x)
    assert "forward" not in model.__dict__


def test_activation_checkpointing_inside_keeps_the_gradient(x):
    plain, checkpointed = Double(), Double()
    inside = nn.Sequential(checkpoint_wrapper(checkpointed))
    redirect(nn.Sequential(inside), inside, lambda x: inside(x).sum(), x).backward()
    plain(x).sum().backward()
    assert torch.equal(checkpointed.scale.grad, plain.scale.grad)


def test_a_context_is_entered_around_the_function(model, x):
    events = []

    @contextmanager
    def context():
        events.append("enter")
        yield
        events.append("exit")

    redirection = ForwardRedirection(context)
    redirection(Wrapper(model), model, lambda x: events.append("function"), x)
    assert events == ["enter", "function", "exit"]


def test_a_context_gives_the_function_the_autocast_of_the_forward_it_replaces(x):
    """accelerate enters autocast inside the very forward that is replaced."""
    model = nn.Linear(2, 2)
    forward = model.forward

    def autocast():
        return torch.autocast("cpu", dtype=torch.bfloat16)

    def autocast_forward(*args):
        with autocast():
            return forward(*args)

    model.forward = autocast_forward

    def product(x):
        return x @ torch.ones(2, 2)

    assert redirect(Wrapper(model), model, product, x).dtype == torch.float32
    assert ForwardRedirection(autocast)(Wrapper(model), model, product, x).dtype == torch.bfloat16


def test_a_context_that_was_already_made_is_refused():
    with pytest.raises(TypeError, match="callable"):
        ForwardRedirection(nullcontext())


def test_hooks_are_called_in_order_with_both_modules(model, x):
    events = []

    class Recording(ForwardRedirection):
        def on_after_inner_forward(self, wrapper_module, original_module):
            events.append(("inner", wrapper_module, original_module))

        def on_after_outer_forward(self, wrapper_module, original_module):
            events.append(("outer", wrapper_module, "forward" in original_module.__dict__))

    wrapper = Wrapper(model)
    wrapper.register_forward_hook(lambda *_: events.append("wrapper done"))
    Recording()(wrapper, model, square, x)
    assert events == [("inner", wrapper, model), "wrapper done", ("outer", wrapper, False)]


def test_threads_that_share_a_module_each_get_their_own_result(model):
    barrier = threading.Barrier(4)
    results = {}

    class Meeting(Wrapper):
        def forward(self, x):
            barrier.wait(timeout=30)  # every thread is pending before any reaches the module
            return self.inner(x)

    def work(number):
        for round_ in range(50):
            x = torch.tensor(float(round_))
            results[number, round_] = redirect(
                Meeting(model), model, lambda x: x + model(x) + number, x
            )

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert {key: value.item() for key, value in results.items()} == {
        (number, round_): 3.0 * round_ + number for number in range(4) for round_ in range(50)
    }
    assert "forward" not in model.__dict__


class Unwalkable(Double):
    """Refuses to be walked: engines wrap models of many thousand modules."""

    def refuse(self, *args, **kwargs):
        raise AssertionError("walked")

    named_modules = modules = children = named_children = refuse
    named_parameters = parameters = named_buffers = buffers = state_dict = apply = refuse


def test_no_module_is_walked(x):
    class Outer(Unwalkable):
        def forward(self, x):
            return self.module(x)

    model, outer = Unwalkable(), Outer()
    outer.module = model
    assert torch.equal(redirect(outer, model, square, x), x * x)
    assert torch.equal(trl_redirect.redirect(outer, square, x), x * x)


class Engine(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: model,
        Engine,
        lambda model: Engine(Engine(model)),
        lambda model: torch.compile(Engine(model), backend="eager"),
        lambda model: Engine(torch.compile(model, backend="eager")),
    ],
    ids=["itself", "engine", "two", "compiled engine", "engine of compiled"],
)
def test_redirect_finds_the_model_inside(model, x, wrap):
    torch.compiler.reset()
    result = trl_redirect.redirect(wrap(model), lambda x, power: model(x) ** power, x, power=3)
    assert torch.equal(result, (2 * x) ** 3)
    assert "forward" not in model.__dict__
    torch.compiler.reset()


def test_redirect_enters_its_context_and_hands_other_keywords_on(model, x):
    events = []

    @contextmanager
    def context():
        events.append("enter")
        yield
        events.append("exit")

    def shifted(x, context):
        events.append(context)
        return x

    wrapper = Engine(model)
    trl_redirect.redirect(wrapper, shifted, x, context="own", redirect_context=context)
    assert events == ["enter", "own", "exit"]


def test_redirect_refuses_what_forward_redirection_refuses(model, x):
    with pytest.raises(ValueError, match="activation-checkpoint wrapper"):
        trl_redirect.redirect(Engine(checkpoint_wrapper(model)), square, x)
    with pytest.raises(TypeError, match="wrapper_module"):
        trl_redirect.redirect("no module", square, x)
    assert "forward" not in model.__dict__


def test_the_name_that_trl_uses_is_the_same_class():
    assert trl_redirect._ForwardRedirection is ForwardRedirection


def test_exports_are_sorted_and_there():
    assert trl_redirect.__all__ == sorted(trl_redirect.__all__)
    assert all(hasattr(trl_redirect, name) for name in trl_redirect.__all__)
