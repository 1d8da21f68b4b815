"""Text, piece by piece: whole characters, nothing after a stop string, nothing lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minimodel.serve.text import TextWriter

pytestmark = pytest.mark.timeout(120)


def pieces(data, stops=()):
    """What is sent after each byte, and at last; and how many bytes were taken."""
    writer, sent = TextWriter(stops), []
    for count, byte in enumerate(data, start=1):
        sent.append(writer.add(bytes([byte])))
        if writer.has_stopped:
            return [*sent, writer.finish()], count
    return [*sent, writer.finish()], len(data)


def test_a_character_is_sent_when_its_last_byte_is_here():
    assert pieces("aé☕".encode())[0] == ["a", "", "é", "", "", "☕", ""]


def test_bytes_that_are_no_utf8_are_marked_and_spoil_nothing_else():
    assert pieces(b"a\xffb\xc3")[0] == ["a", "�", "b", "", "�"]


@given(st.binary(max_size=30))
def test_the_pieces_are_the_text(data):
    assert "".join(pieces(data)[0]) == data.decode(errors="replace")


@given(st.text(max_size=30))
def test_of_a_text_nothing_is_marked(text):
    assert "".join(pieces(text.encode())[0]) == text


@pytest.mark.parametrize(("text", "stops", "sent", "count"), [
    ("yes\n\nno", ["\n\n"], "yes", 5),
    ("yes\nno", ["\n\n"], "yes\nno", 6),                # what was held back comes after all
    ("aab", ["ab"], "a", 3),                            # a beginning within a beginning
    ("xyz", ["z", "yz"], "x", 3),                       # of two that end here, the earlier
    ("xyz", ["xyzzy"], "xyz", 3),                       # a beginning only
    ("café!", ["é"], "caf", 5),
    ("stop", ["stop"], "", 4),
    ("abc", ["c", "b"], "a", 2)])
def test_nothing_of_a_stop_string_is_sent(text, stops, sent, count):
    found, taken = pieces(text.encode(), [stop.encode() for stop in stops])
    assert ("".join(found), taken) == (sent, count)


@given(st.text("ab\n", max_size=20), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
def test_it_is_cut_where_the_first_stop_string_is_complete(text, stops):
    found, taken = pieces(text.encode(), [stop.encode() for stop in stops])
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert ("".join(found), taken) == (text, len(text))
        return
    assert taken == min(ends)
    begins = min(text[:taken].index(stop) for stop in stops if stop in text[:taken])
    assert "".join(found) == text[:begins]


def test_after_a_stop_string_nothing_more_is_sent():
    writer = TextWriter([b"b"])
    assert [writer.add(byte) for byte in (b"a", b"b", b"c")] == ["a", "", ""]
    assert writer.has_stopped
    assert writer.finish() == ""
