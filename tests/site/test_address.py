"""The repository's address is stated once, and every copy of it agrees."""

import shutil

import address
import pytest
from places import ROOT

NEW = "https://github.com/Someone/their-fork"


def test_all_places_agree():
    assert address.disagreements() == []


def test_one_command_moves_the_book(tmp_path):
    """After a move the config states the new address, and no carrier holds the old one."""
    old = address.slug_of(address.repository_url())
    for path in [address.CONFIG, *address.carriers()]:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    address.move(NEW, tmp_path)
    assert address.repository_url(tmp_path / "_config.yml") == NEW
    assert address.disagreements(tmp_path) == []
    assert [path for path in address.carriers(tmp_path) if old in path.read_text()] == []


def test_a_forgotten_copy_is_named(tmp_path):
    for path in [address.CONFIG, *address.carriers()]:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    readme = tmp_path / "README.md"
    readme.write_text("nothing here")
    assert [fault.split()[0] for fault in address.disagreements(tmp_path)] == ["README.md"]


def test_the_pages_address_follows():
    assert address.pages_url(NEW) == "https://someone.github.io/their-fork/"


@pytest.mark.parametrize(
    "url", ["", "github.com/a/b", "https://example.org/a/b", "https://github.com/a"])
def test_other_addresses_are_refused(url):
    with pytest.raises(ValueError, match=r"give https://github\.com/OWNER/NAME"):
        address.slug_of(url)
