"""Whoever called TRL 0.18 calls ours alike: same names, parameters, order and defaults."""

import pytest

from tools.rails.peers import OURS, find, run_both

pytestmark = pytest.mark.full

METHODS = {
    "PreTrainedModelWrapper": [
        "__init__",
        "add_and_load_reward_modeling_adapter",
        "compute_reward_score",
        "from_pretrained",
        "post_init",
        "push_to_hub",
        "save_pretrained",
        "state_dict",
    ],
    "AutoModelForCausalLMWithValueHead": ["__init__", "forward", "generate"],
    "AutoModelForSeq2SeqLMWithValueHead": ["__init__", "forward", "generate"],
    "ValueHead": ["__init__", "forward"],
    "_ForwardRedirection": ["__call__", "on_after_inner_forward", "on_after_outer_forward"],
}
ATTRIBUTES = {
    "PreTrainedModelWrapper": ["supported_modules", "supported_rm_modules"],
    "AutoModelForCausalLMWithValueHead": ["supported_args"],
    "AutoModelForSeq2SeqLMWithValueHead": ["supported_args"],
}
# A wrapper around nothing was of no use.
REQUIRED_HERE = {("PreTrainedModelWrapper.__init__", "pretrained_model")}


def describe(library):
    """By callable: its named parameters as (name, default), and whether more keywords fit."""
    import inspect

    found = {}
    for name in sorted(name for names in OURS.values() for name in names):
        target = find(library, name)
        callables = {
            f"{name}.{method}": getattr(target, method) for method in METHODS.get(name, [])
        }
        if not callables and callable(target):
            callables = {name: target}
        for path, function in callables.items():
            parameters = inspect.signature(function).parameters.values()
            named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
            positional = [p.name for p in named if p.kind is not p.KEYWORD_ONLY]
            defaults = {p.name: repr(p.default) for p in named}
            found[path] = (positional, defaults)
    for name, attributes in ATTRIBUTES.items():
        for attribute in attributes:
            found[f"{name}.{attribute}"] = list(getattr(find(library, name), attribute))
    return found


def test_every_public_name_takes_what_trls_takes():
    ours, theirs = run_both(describe)
    assert ours.keys() == theirs.keys()
    for path, (positional, defaults) in [
        (path, value) for path, value in theirs.items() if isinstance(value, tuple)
    ]:
        our_positional, our_defaults = ours[path]
        assert our_positional[: len(positional)] == positional, path
        for name, default in defaults.items():
            if (path, name) not in REQUIRED_HERE:
                assert our_defaults[name] == default, (path, name)


def test_the_classes_have_trls_attributes():
    ours, theirs = run_both(describe)
    for path, value in theirs.items():
        if isinstance(value, list):
            assert set(value) <= set(ours[path]), path
