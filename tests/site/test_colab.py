"""The run with Colab's versions: which versions it takes, and that they meet our floors."""

import re
import tomllib

import colab
import pytest
from packaging.requirements import Requirement
from places import ROOT

OURS = colab.VERSIONS.read_text(encoding="utf-8")


def test_versions_are_read_from_a_freeze_list():
    listed = OURS.replace("torch==2.11.0", "torch @ https://example.org/whl/cpu/"
                          "torch-2.7.1%2Bcpu-cp313-cp313-manylinux_2_28_x86_64.whl")
    listed += "ipython-sql==0.5.0\ntorchvision==0.3\n# numpy==1.0\n"
    found = colab.pins(listed)
    assert found["torch"] == "2.7.1"
    assert (found["ipython"], found["jupyter-client"]) == ("7.34.0", "7.4.9")
    assert set(found) == colab.MET


def test_a_list_with_gaps_is_refused():
    without = re.sub(r"(?m)^(numpy|tqdm)==.*\n", "", OURS)
    with pytest.raises(SystemExit, match="lacks numpy, tqdm: take the whole"):
        colab.pins(without)


def test_colabs_versions_meet_our_floors():
    """A floor above them would make the first cell replace what Colab's readers have."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = colab.pins(OURS)
    floors = [Requirement(line) for line in project["dependencies"]]
    assert len(floors) > 5
    assert [f"{floor} but {found[floor.name]}" for floor in floors
            if found[floor.name] not in floor.specifier] == []


def test_the_first_cell_is_the_one_that_installs():
    assert "SECOND_SEND_SOURCE" in colab.first_cell() and "install" in colab.first_cell()
