"""A repository in which everything was released, made once and copied for each test."""

import pytest

from tests.release.throwaway import Repository


@pytest.fixture(scope="session")
def released_once(tmp_path_factory):
    return Repository.copy_tree(tmp_path_factory.mktemp("released") / "repository")


@pytest.fixture
def repository(released_once, tmp_path):
    """A repository in which everything was released as 0.1.0, and nothing changed since."""
    return released_once.clone(tmp_path / "repository")
