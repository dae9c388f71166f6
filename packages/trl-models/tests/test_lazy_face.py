"""One import for all packages, which loads none of them until a name is used."""

import importlib
import subprocess
import sys

import pytest

import trl_models

SIBLINGS = ["trl_chatformat", "trl_prepare", "trl_redirect", "trl_valuehead", "trl_zero3"]
MODULES = [importlib.import_module(sibling) for sibling in SIBLINGS]
SOURCES = {name: module for module in MODULES for name in module.__all__}


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def loaded_after(statement):
    return set(run(f"import sys; {statement}; print(*sys.modules)").split())


def test_the_import_loads_neither_torch_nor_a_sibling():
    loaded = loaded_after("import trl_models; dir(trl_models)")
    assert "trl_models" in loaded
    assert loaded.isdisjoint([*SIBLINGS, "torch", "transformers", "accelerate", "tokenizers"])


def test_a_name_loads_its_own_package_only():
    loaded = loaded_after("from trl_models import ChatMlSpecialTokens")
    assert "trl_chatformat" in loaded
    assert loaded.isdisjoint([*SIBLINGS[1:], "torch", "transformers"])


def test_every_public_name_of_every_package_is_here():
    assert set(trl_models.__all__) == {*SOURCES, "SUPPORTED_ARCHITECTURES"}
    assert len(trl_models.__all__) == len(set(trl_models.__all__))


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_a_name_is_the_very_object_of_its_package(name):
    assert getattr(trl_models, name) is getattr(SOURCES[name], name)
    assert name in dir(trl_models)


def test_supported_architectures_are_the_two_with_value_heads():
    assert (
        trl_models.AutoModelForCausalLMWithValueHead,
        trl_models.AutoModelForSeq2SeqLMWithValueHead,
    ) == trl_models.SUPPORTED_ARCHITECTURES


def test_a_star_import_brings_all_names():
    names = run("from trl_models import *; print(*dir())").split()
    assert set(trl_models.__all__) <= set(names)


def test_a_misspelt_name_is_an_error_that_suggests_the_right_one():
    with pytest.raises(AttributeError, match=r"Did you mean 'setup_chat_format'\?"):
        trl_models.setup_chatformat  # noqa: B018
    with pytest.raises(AttributeError, match=r"module 'trl_models' has no attribute 'qqq'\.$"):
        trl_models.qqq  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'unwrap_model'"):
        from trl_models import unwrap_model  # noqa: F401
