"""A store in the test's own folder, by a clock that the test sets."""

import runpy
from pathlib import Path

import pytest

from minimodel.cache.store import DiskStore
from minimodel.simulate.replay import VirtualClock

MODEL = runpy.run_path(str(Path(__file__).with_name("store_processes.py")))["MODEL"]


@pytest.fixture
def clock():
    clock = VirtualClock()
    clock.now_s = 1_800_000_000.0
    return clock


@pytest.fixture
def open_store(tmp_path, clock):
    """Opens a store on the same folder, as often as it is called; options as of DiskStore."""
    def make(fingerprint=MODEL, **options):
        return DiskStore(tmp_path / "notes", fingerprint, **{"min_free_bytes": 0, "clock": clock,
                                                             **options})
    return make


@pytest.fixture
def store(open_store):
    return open_store()
