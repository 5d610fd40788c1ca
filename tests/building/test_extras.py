"""Check the packages of the base installation, and the hints for extras."""

import importlib.metadata
import shlex
import tomllib
from pathlib import Path

import pytest

from trio_nsq.platform.extras import install_hint

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> set[str]:
    return {requirement.partition(">")[0].partition("<")[0] for requirement in requirements}


def test_broker_with_every_option_needs_no_extra() -> None:
    assert "google-re2" in names(PROJECT["dependencies"])


def test_hint_names_packages_of_the_index() -> None:
    words = shlex.split(install_hint("spark"))
    assert words[:2] == ["pip", "install"]
    assert names(words[2:]) == names(PROJECT["optional-dependencies"]["spark"])


def test_hint_without_an_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert set(shlex.split(install_hint("spark"))[2:]) == names(PROJECT["optional-dependencies"]["spark"])
