"""A whole release, from a change to what a user installs by name."""

import pytest


@pytest.mark.full
@pytest.mark.parametrize("name", ["trl-redirect", "trl-prepare"])
def test_a_release_can_be_rehearsed(repository, name):
    printed = repository.release("rehearse", name)
    assert f"would tag {name}-v0.1.1" in printed
    assert f"\ntag {name}-v0.1.1" in printed
    assert f"{name} 0.1.1: installed by name, and its README's examples run" in printed
    assert repository.git("status", "--porcelain") == ""


@pytest.mark.full
def test_wheels_are_tested_with_the_newest_and_the_lowest_versions(repository):
    printed = repository.release("check", "trl-chatformat")
    assert "alone, with the newest versions: " in printed
    assert "alone, with the lowest versions: " in printed
    assert (repository.folder / "dist" / "trl-chatformat-0.1.0.json").is_file()
