"""A block's record: what is written is read, and nothing that differs from it in a single bit."""

import array
import itertools
import os
import random
import stat
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minimodel.cache import record
from minimodel.cache.record import HEAD_BYTES, NO_KEY, Header, RecordError

KEY, PARENT, MODEL = b"k" * 32, b"p" * 32, b"m" * 32
PAYLOAD = bytes(range(101, 114))        # 13 bytes
USED_S = 1_800_000_123.5


def header(num_bytes=13, **changes):
    return Header(**{"created_s": 1_800_000_001, "ttl_s": 86_401, "num_bytes": num_bytes,
                     "key": KEY, "parent": PARENT, "fingerprint": MODEL, **changes})


def read(path, num_bytes=13, key=KEY, model=MODEL):
    into = bytearray(num_bytes)
    found = record.read(path, key, model, memoryview(into))
    return found, bytes(into)


def num_open_files():
    return len(list(Path("/dev/fd").iterdir()))


@pytest.fixture
def path(tmp_path):
    """A good record."""
    path = tmp_path / "a.kv"
    record.write(path, header(), PAYLOAD, USED_S)
    return path


# --- whole records ------------------------------------------------------------------------------

def test_g35_what_is_read_is_what_was_written(path):
    """The same store, a new process: every output is corrupt."""
    assert read(path) == (header(), PAYLOAD)
    assert record.read_header(path) == header()
    assert path.stat().st_size == header().record_bytes == HEAD_BYTES + 13


def test_the_bytes_lie_where_the_table_says(path):
    data = path.read_bytes()
    assert data[:4] == b"SSB1"
    assert struct.unpack("<I", data[4:8])[0] == zlib.crc32(data[8:])
    assert struct.unpack("<QII", data[8:24]) == (1_800_000_001, 86_401, 13)
    assert (data[24:56], data[56:88], data[88:120], data[120:]) == (KEY, PARENT, MODEL, PAYLOAD)
    assert HEAD_BYTES == 120


def test_the_time_of_last_use_is_the_file_s(path):
    assert path.stat().st_mtime == USED_S
    assert stat.S_IMODE(path.stat().st_mode) == 0o600       # prompts can be told from notes


@pytest.mark.parametrize("payload", [
    b"", b"x", bytearray(b"seven!!"), memoryview(bytes(range(250)))[3:200],
    array.array("f", [1.5, -2.5, 3e8]), memoryview(array.array("d", [0.1] * 12)).cast("B"),
    memoryview(bytes(24)).cast("B", (2, 3, 4)), os.urandom(100_003)],
    ids=["none", "one", "bytearray", "slice", "floats", "doubles", "three axes", "large"])
def test_every_kind_of_payload_comes_back(tmp_path, payload):
    num_bytes = memoryview(payload).nbytes
    record.write(tmp_path / "a.kv", header(num_bytes), payload, USED_S)
    assert read(tmp_path / "a.kv", num_bytes)[1] == bytes(memoryview(payload).cast("B"))


def test_a_read_goes_straight_into_the_caller_s_memory(path):
    memory = bytearray(b"." * 20)
    record.read(path, KEY, MODEL, memoryview(memory)[3:16])
    assert memory == b"..." + PAYLOAD + b"...."


def test_writes_that_stop_early_are_continued(tmp_path, monkeypatch):
    """A system may write less than it was given."""
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:5]))
    record.write(tmp_path / "a.kv", header(), PAYLOAD, USED_S)
    assert read(tmp_path / "a.kv") == (header(), PAYLOAD)


def test_a_file_that_is_there_is_not_written_into(path):
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        record.write(path, header(), bytes(13), USED_S)
    assert path.read_bytes() == before


def test_a_first_block_has_no_parent(tmp_path):
    record.write(tmp_path / "a.kv", header(parent=NO_KEY), PAYLOAD, USED_S)
    assert record.read_header(tmp_path / "a.kv").parent == bytes(32)


# --- doubtful records ---------------------------------------------------------------------------

def test_a_change_of_any_single_bit_is_found(path):
    """All 1,064 of them: in every field of the head, and in the payload."""
    data = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for place, bit in itertools.product(range(len(data)), range(8)):
            os.pwrite(file.fileno(), bytes([data[place] ^ 1 << bit]), place)
            with pytest.raises(RecordError):
                read(path)
            os.pwrite(file.fileno(), data[place:place + 1], place)
    assert read(path) == (header(), PAYLOAD)


@pytest.mark.parametrize("seed", range(40))
def test_random_damage_to_a_large_record_is_found(tmp_path, seed):
    rng = random.Random(seed)
    payload = rng.randbytes(33_001)
    path = tmp_path / "a.kv"
    record.write(path, header(len(payload)), payload, USED_S)
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 2, 7])):          # runs of bytes: zeros, noise, or other places
        first, size = rng.randrange(len(data)), rng.choice([1, 3, 64, 4096])
        other = rng.choice([bytes(size), rng.randbytes(size), bytes(data[:size])])
        data[first:first + size] = other[:len(data[first:first + size])]
    assert data != path.read_bytes()
    path.write_bytes(data)
    with pytest.raises(RecordError):
        read(path, len(payload))


def test_g43_a_record_cut_anywhere_is_no_record(path):
    """A short read goes unnoticed: the rest of the buffer is what lay in memory before."""
    for size in reversed(range(path.stat().st_size)):
        os.truncate(path, size)
        with pytest.raises(RecordError):
            read(path)
        with pytest.raises(RecordError):
            record.read_header(path)


@pytest.mark.parametrize("more", [b"\0", b"x", bytes(4096)])
def test_a_record_with_something_after_it_is_no_record(path, more):
    path.write_bytes(path.read_bytes() + more)
    with pytest.raises(RecordError, match="bytes"):
        read(path)
    with pytest.raises(RecordError, match=f"has {133 + len(more)} bytes, not 133"):
        record.read_header(path)


@pytest.mark.parametrize("kept", [0, 4, 8, 100, 120, 128])
def test_zeros_from_any_place_on_are_found(path, kept):
    """After a power cut a file may have its length and not its content."""
    data = path.read_bytes()
    path.write_bytes(data[:kept] + bytes(len(data) - kept))
    with pytest.raises(RecordError):
        read(path)


def test_g34_a_record_under_another_s_name_is_not_read(path):
    """Answers with another user's content, and nothing in any log."""
    with pytest.raises(RecordError, match="another block's record, or another model's"):
        read(path, key=b"K" * 32)


def test_g36_another_model_s_record_is_not_read(path):
    with pytest.raises(RecordError, match="another block's record, or another model's"):
        read(path, model=b"M" * 32)


@pytest.mark.parametrize("num_bytes", [0, 1, 12, 14, 26])
def test_notes_of_another_size_are_not_read(path, num_bytes):
    """Another number type: half the bytes, or twice as many."""
    with pytest.raises(RecordError, match=r"bytes or more, not|another block"):
        read(path, num_bytes)


@given(st.binary(max_size=300))
def test_noise_is_no_record(tmp_path_factory, noise):
    path = tmp_path_factory.getbasetemp() / "noise.kv"
    path.write_bytes(noise)
    with pytest.raises(RecordError):
        read(path)
    with pytest.raises(RecordError):
        record.read_header(path)


def test_a_header_alone_is_believed_only_in_form(path):
    """`read_header` reads no payload, so it cannot know: `read` does."""
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert record.read_header(path) == header()
    with pytest.raises(RecordError, match="its checksum does not fit"):
        read(path)


def test_what_is_not_there_says_so(tmp_path):
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "a.kv")
    with pytest.raises(FileNotFoundError):
        record.read_header(tmp_path / "a.kv")


def test_no_failure_leaves_a_file_open(path, tmp_path, monkeypatch):
    before = num_open_files()
    path.write_bytes(path.read_bytes()[:50])
    for attempt in (lambda: read(path), lambda: record.read_header(path)):
        with pytest.raises(RecordError):
            attempt()

    def full(file, data):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        record.write(tmp_path / "b.kv", header(), PAYLOAD, USED_S)
    assert num_open_files() == before


@pytest.mark.parametrize("most", [1, 3, 50, 119, 120, 121, 125])
def test_a_read_that_brings_less_than_asked_goes_on(path, monkeypatch, most):
    """A file over a network may come in pieces: that is no damage."""
    real = os.preadv

    def in_pieces(file, buffers, offset):
        first = memoryview(buffers[0])[:most]
        return real(file, [first], offset)
    monkeypatch.setattr(os, "preadv", in_pieces)
    assert read(path) == (header(), PAYLOAD)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RecordError, match="has 132 bytes or more, not 133"):
        read(path)
