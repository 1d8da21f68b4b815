"""Chapter 11: its cells agree with the shipped store, its drawings say what they were given."""

import os
import random
import re
import struct
import tempfile
import zlib

import pytest
from notebooks import Notebook, refusals

from minimodel.cache import record
from minimodel.cache.record import HEAD_BYTES, NO_KEY, Header
from minimodel.cache.store import DiskStore
from minimodel.cache.store_index import StoreIndex
from minimodel.lesson import chapter_11
from minimodel.lesson.exercises import chapter_11 as exercises
from minimodel.lesson.exercises.engine import judge

NOTEBOOK = Notebook("11_disk_store", struct=struct, zlib=zlib, random=random, StoreIndex=StoreIndex)
run, verdict = NOTEBOOK.run, refusals(exercises)


# --- the notebook's own code ---------------------------------------------------------------


def test_the_hand_built_record_is_the_shipped_one():
    pack = run("pack")["pack"]
    key, parent, stamp, payload = (bytes([i]) * 32 for i in (3, 5, 7, 9))
    header = Header(1_793_620_800, 604_800, len(payload), key, parent, stamp)
    assert pack(key, parent, stamp, payload, 1_793_620_800, 604_800) == (
        header.pack(payload) + payload)


@pytest.mark.parametrize("at", [0, 5, 12, 21, 30, 70, 100, HEAD_BYTES + 17])
def test_the_hand_built_reader_refuses_a_flipped_bit_anywhere(at):
    names = run("pack")
    key, stamp, payload = b"k" * 32, b"f" * 32, bytes(range(53))
    raw = bytearray(names["pack"](key, NO_KEY, stamp, payload, 11, 13))
    assert names["unpack"](bytes(raw), key, stamp, 53) == payload
    raw[at] ^= 8
    assert names["unpack"](bytes(raw), key, stamp, 53) is None


def test_the_hand_built_shelf_is_the_shipped_index():
    run("shelf", "agree-index", week=604_800)


def test_the_comparison_finds_a_shelf_that_touches_from_first_to_last():
    Shelf = run("shelf")["Shelf"]

    class WrongWay(Shelf):
        def touch(self, keys):
            super().touch(keys[::-1])

    with pytest.raises(AssertionError):
        run("agree-index", Shelf=WrongWay, week=604_800)


def test_a_chain_is_given_up_from_its_end():
    assert [*run("shelf", "leaf-first")["shelf"].names] == ["A2", "A1", "B3", "B2", "C2", "B1"]


def test_nothing_is_found_before_a_file_is_whole(tmp_path, capsys):
    run("half-written", naive=tmp_path, notes=bytes(20_000))
    said = capsys.readouterr().out.splitlines()
    assert said == ["direct: a reader finds 9000 bytes", "aside: a reader finds None bytes",
                    "aside: a reader finds 20000 bytes"]


# --- other processes -----------------------------------------------------------------------


def test_a_program_gets_folder_and_prompt_and_finds_the_package(tmp_path):
    program = ("import json, sys, minimodel.pricing\n"
               "print(json.dumps({'folder': sys.argv[1], 'got': json.load(sys.stdin)}))")
    assert chapter_11.run_program(program, tmp_path, (7, 5, 3)) == {
        "folder": str(tmp_path), "got": [7, 5, 3]}


def test_a_program_that_fails_says_why(tmp_path):
    with pytest.raises(RuntimeError, match="no such town"):
        chapter_11.run_program("raise ValueError('no such town')", tmp_path, [])


def test_a_killed_program_does_not_go_on(tmp_path):
    program = ("import sys, time; from pathlib import Path\n"
               "print('ready', flush=True); time.sleep(20)\n"
               "Path(sys.argv[1], 'late').touch()")
    assert chapter_11.kill_when(program, tmp_path, [1], "ready") == 9
    assert not list(tmp_path.iterdir())


def test_a_program_that_never_says_the_word_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="never said 'half'"):
        chapter_11.kill_when("print('whole')", tmp_path, [], "half")


def test_a_writer_killed_in_the_middle_leaves_nothing_that_is_found(tmp_path):
    """The chapter's trap, with a small writer of its own: the third record stays unfinished."""
    writer = ("from minimodel.cache.store import DiskStore\n"
              "keys = [bytes([i]) * 32 for i in range(5)]\n"
              "store = DiskStore(sys.argv[1], 'ab' * 32)\n"
              "store.save_chain(keys, [bytes(3_000)] * 5)\n")
    trap = run("kill-writer", drawing=_Nothing(), home=_Nothing(), Path=lambda *_: _Nothing(),
               PROGRAM="", prompt=[])["TRAP"]
    trap = "import sys\n" + trap.replace("< 60", "< 6")
    assert chapter_11.kill_when(trap + writer, tmp_path, [], "half") == 9
    left = sorted(path.suffix for path in tmp_path.glob("**/*") if path.suffix)
    assert left == [".kv", ".kv", ".tmp"]
    store = DiskStore(tmp_path, "ab" * 32)
    assert store.longest_prefix([bytes([i]) * 32 for i in range(5)]) == 2
    assert store.check() == 2 and not list(tmp_path.glob("**/*.tmp"))


class _Nothing:
    """Stands in for what the cell does besides defining its trap."""

    name = ""

    def __getattr__(self, name):
        return lambda *args: [_Suffix(".kv")] * 29 + [_Suffix(".tmp")] if name == "glob" else 9


class _Suffix:
    def __init__(self, suffix):
        self.suffix = suffix


def test_the_command_line_is_the_package_s_own(tmp_path):
    DiskStore(tmp_path, "ab" * 32).save_chain([b"k" * 32], [bytes(70)])
    assert "1 records, 190 bytes" in chapter_11.command_line("store", "stats", tmp_path)
    assert "no-such-thing" in chapter_11.command_line("no-such-thing")


# --- drawings ------------------------------------------------------------------------------


def test_a_record_is_drawn_byte_by_byte():
    key, payload = b"\xab" * 32, bytes(range(16, 77))
    header = Header(1_793_620_800, 259_200, len(payload), key, NO_KEY, b"\xcd" * 32)
    drawing = chapter_11.record_drawing(header.pack(payload) + payload)
    shown = re.findall(r">([0-9a-f]{2})</text>", drawing)
    assert bytes.fromhex("".join(shown)) == (header.pack(payload) + payload)[:128]
    for words in ("SSB1", "2026-11-02 12:00 UTC", "259,200 s after its last use",
                  "61 bytes of payload", "abababababababab ...", "zeros: a first block"):
        assert f">{words}<" in drawing


def test_fields_fill_the_head():
    assert sum(size for name, size, _ in chapter_11.FIELDS if name != "payload") == HEAD_BYTES


def test_what_is_no_record_is_not_drawn():
    with pytest.raises(record.RecordError):
        chapter_11.record_drawing(bytes(200))


def test_ratios_are_shown_as_measured():
    shown = chapter_11.second_send_figure([17, 33], [4, 9], [3, 5])
    found = list(zip(*shown.table.values(), strict=True))
    assert ("time, from disk", "measured", 33, 5) in found
    assert ("tokens computed", "measured", 33, 33) in found
    assert "33 tokens: 5 times sooner from disk, 9 times from memory" in " ".join(
        shown.fig.axes[0].get_title("left").split())


# --- numbers -------------------------------------------------------------------------------


def test_equation_11_1_gives_the_worked_examples():
    assert chapter_11.break_even(890, 1_000) == 890_000
    v3, v41 = (chapter_11.modelled_break_even(*numbers)
               for _, *numbers in (chapter_11.V3, chapter_11.V41))
    assert v3 == pytest.approx(0.75e9, rel=0.01)
    assert v41 == pytest.approx(0.10e9, rel=0.01)
    assert 7 < v3 / v41 < 8                     # what the chapter makes of it


def test_break_even_keeps_the_kinds_apart():
    shown = chapter_11.break_even_figure(needed=23e6, found=1.9e9)
    kinds = {}
    for series, kind, *_ in zip(*shown.table.values(), strict=True):
        kinds.setdefault(kind, []).append(series)
    assert len(kinds["reported"]) == 4 and len(kinds["modelled"]) == 2
    assert sorted(kinds["measured"]) == ["the toy here needs 0.023", "this folder gives 1.9"]


def test_keeping_longer_finds_more_and_holds_more():
    for name in chapter_11.CLASSES:
        found, asked, held = zip(*chapter_11.kept()[name], strict=True)
        assert list(found) == sorted(found) and list(held) == sorted(held)
        assert len(set(asked)) == 1 and found[-1] < asked[0]


def test_the_explorable_adds_two_rows():
    shown = chapter_11.remember(72, 168)
    table = chapter_11.kept()
    agent, chat = table["agent"][5], table["chat"][6]
    assert shown["hit"] == pytest.approx(100 * (agent[0] + chat[0]) / (agent[1] + chat[1]))
    assert shown["held"] == pytest.approx(agent[2] + chat[2])
    assert chapter_11.remember(336, 336)["lost"] == 0 < shown["lost"]


def test_what_the_chapter_says_about_its_traffic():
    week, three = chapter_11.remember(72, 168), chapter_11.remember(72, 72)
    assert 0.5 < week["chat_hit"] - three["chat_hit"] < 2       # about one in a hundred
    assert week["chat_held"] > 2 * three["chat_held"]           # more than twice the disk
    assert 30 < week["held"] < 300                              # near the reported 100 PB
    assert week["hit"] > 91
    assert all(chapter_11.kept()[name][0][0] > 0.8 * chapter_11.kept()[name][-1][0]
               for name in chapter_11.CLASSES)                  # the first hour finds most


def test_the_cheapest_pair_above_91_keeps_agents_longer():
    pairs = [(chapter_11.remember(agent, chat), agent, chat)
             for agent in chapter_11.HOURS for chat in chapter_11.HOURS]
    _, agent, chat = min((shown["held"], agent, chat) for shown, agent, chat in pairs
                         if shown["hit"] > 91)
    assert (agent, chat) == (48, 24)


def test_both_handles_move_along_one_curve():
    shown = chapter_11.capacity_figure([0.3e9, 3e9])
    assert set(shown.table["kind"]) == {"modelled"}
    room = [(x, y) for series, x, y in zip(shown.table["series"], shown.table["x"],
                                           shown.table["y"], strict=True) if "room" in series]
    (less, few), (more, many) = room
    assert more == pytest.approx(10 * less) and 0 < many - few < 5


def test_waits_end_at_what_was_never_there_before():
    shown = chapter_11.waits_figure()
    assert set(shown.table["kind"]) == {"modelled"}
    assert re.search(r"in the end 8\d % of chats' and 9\d % of agents'", shown.alt)


# --- exercises: wrong answers are told why ----------------------------------------------------


def test_near_misses_get_their_own_sentence():
    assert "other way round" in verdict("11.1", (16, 156))
    assert "blocks are found whole" in verdict("11.1", (156, 1))
    assert "all full blocks are *saved*" in verdict("11.1", (155, 16))
    assert "which end" in verdict("11.2", ("A3", "B1"))
    assert "other order" in verdict("11.2", "B2, A3")
    assert "Two names" in verdict("11.2", ("A3", "Z9"))
    assert "asks for MB/s" in verdict("11.3", (45_465_600, 5.5))
    assert "turn the second around" in verdict("11.3", (45.4656, 0.182))
    assert "Divide by the rate" in verdict("11.7", 0.921)
    assert "straight line" in verdict("11.7", 2.25)
    assert "their order" in verdict("11.2", {"A3", "B2"})
    assert "other way round" in verdict("11.3", (5.5, 45.5))
    assert "do not round" in verdict("11.7", 6)


def test_a_reader_that_trusts_the_length_or_the_key_is_told():
    def any_key(raw, key, num_bytes):
        if len(raw) != 36 + num_bytes:
            return None
        return raw[36:] if zlib.crc32(raw[4:]) == struct.unpack("<I", raw[:4])[0] else None

    def any_length(raw, key, num_bytes):
        if len(raw) < 36 or raw[4:36] != key:
            return None
        return raw[36:] if zlib.crc32(raw[4:]) == struct.unpack("<I", raw[:4])[0] else None

    assert "of another block" in verdict("11.4", any_key)
    assert "of a shorter block" in verdict("11.4", any_length)
    assert "raise an error" in verdict("11.4", lambda raw, key, num_bytes: (
        struct.unpack("<I", raw[:4]) and raw[36:]
        if zlib.crc32(raw[4:]) == struct.unpack("<I", raw[:4])[0] and raw[4:36] == key
        and len(raw) == 36 + num_bytes else None))


def publisher(name_of, tidy=True):
    def publish(folder, name, pieces):
        temporary = folder / name_of(name)
        try:
            with temporary.open("wb") as file:
                for piece in pieces:
                    file.write(piece)
            temporary.replace(folder / name)
        except OSError:
            if tidy:
                temporary.unlink(missing_ok=True)
            raise
    return publish


def test_a_writer_that_leaves_files_or_shares_a_name_is_told():
    assert "still lies there" in verdict("11.5", publisher(
        lambda name: f"{name}.{random.random()}", tidy=False))
    assert "Two processes" in verdict("11.5", publisher(lambda name: f"{name}.tmp"))


def test_a_name_of_the_process_s_own_is_right():
    assert judge(exercises.CHAPTER["11.5"], publisher(lambda name: f"{name}.{os.getpid()}"))


def test_a_moment_in_which_the_file_is_not_whole_is_seen():
    """Even if all pieces are taken before a byte is written, or the old file goes first."""
    def at_once(folder, name, pieces):
        (folder / name).write_bytes(b"".join(pieces))

    def removes_first(folder, name, pieces):
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.writelines(pieces)
            file.flush()
            (folder / name).unlink(missing_ok=True)
            os.link(file.name, folder / name)

    def shared(folder, name, pieces):
        temporary = folder / f"{name}.tmp"
        temporary.write_bytes(b"".join(pieces))
        temporary.replace(folder / name)

    assert "finds `b''` under the name" in verdict("11.5", at_once)
    assert "finds no file instead" in verdict("11.5", removes_first)
    assert "both write to `block.tmp`" in verdict("11.5", shared)


def test_a_time_in_the_future_is_mended_or_told():
    def forgets(entries, now):
        return {name: (used, ttl) for name, (used, ttl) in entries.items()
                if now + 60 >= used >= now - ttl}

    def for_ever(entries, now):
        return {name: (used, ttl) for name, (used, ttl) in entries.items() if now - used <= ttl}

    def in_lists(entries, now):
        return {name: [min(used, now), ttl] for name, (used, ttl) in entries.items()
                if now - used <= ttl}

    assert judge(exercises.CHAPTER["11.6"], in_lists)
    assert "no reason to lose" in verdict("11.6", forgets)
    assert "for ten years" in verdict("11.6", for_ever)
