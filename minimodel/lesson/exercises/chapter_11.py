"""The exercises of chapter 11. No two numbers of a task are equal, so a swapped pair fails."""

import math
import random
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from minimodel.lesson.exercises.common import pair_in
from minimodel.lesson.exercises.engine import (
    Chapter,
    Exercise,
    NotAnAnswer,
    Verdict,
    function_in,
    number_in,
    right,
    wrong,
)

# --- 11.1 ----------------------------------------------------------------------------------


def check_files(answer: object) -> Verdict:
    records, computed = pair_in(answer)
    if (records, computed) == (16, 156):
        return wrong("The other way round: first the records, then the tokens.")
    if records == 155:
        return wrong("155 blocks can be *found*, since the last token is always left. But all "
                     "full blocks are *saved*: a longer prompt can use the last one, too.")
    if records != 156:
        return wrong("Every full block becomes a record. How often does 16 go into 2,496?")
    if computed == 1:
        return wrong("One token would do if the last block could be used without its last token. "
                     "But blocks are found whole, and the last token must be computed.")
    if computed == 0:
        return wrong("Nothing to compute means no logits, and so no first token of an answer.")
    if computed != 16:
        return wrong("At most 2,495 of the 2,496 tokens may come from blocks, and only whole ones: "
                     "how many blocks fit into that?")
    return right("156 and 16. The prompt ends exactly where a block ends: that block is saved, "
                 "and of no use to the same prompt, since its last token must be computed.")


FILES = Exercise(
    id="11.1", kind="check", title="Count the files",
    prompt="A prompt of 2,496 tokens is sent to the toy (blocks of 16), which answers with a "
           "single token. How many records does the store hold then? The engine is started anew, "
           "and the same prompt comes again: how many of its tokens are computed?",
    starter="answer = (..., ...)   # (records, tokens computed)",
    check=check_files,
    hints=("2,496 is 156 times 16.",
           "Which rule of chapter 10 keeps a lookup from taking the whole prompt?"),
    solution="records = 2496 // 16\n"
             "found = (2496 - 1) // 16 * 16     # the last token is always computed\n"
             "answer = (records, 2496 - found)",
)

# --- 11.2 ----------------------------------------------------------------------------------


def check_order(answer: object) -> Verdict:
    if isinstance(answer, str):
        answer = answer.replace(",", " ").split()
    if not isinstance(answer, list | tuple):        # the order of a set means nothing
        raise NotAnAnswer('Two names in their order are asked for, as in ("A1", "B2").')
    names = [str(name).strip().upper() for name in answer]
    if len(names) != 2 or not all(name in ("A1", "A2", "A3", "B1", "B2", "C1", "D1")
                                  for name in names):
        raise NotAnAnswer('Two names are asked for, as in ("A1", "B2").')
    if set(names) == {"B1", "B2"}:
        return wrong("B was used before A was used *again*. But was all of A used again?")
    if set(names) == {"A3", "B1"}:
        return wrong("A3 first, which is right. Then a block of B goes: of a chain, which end?")
    if names == ["B2", "A3"]:
        return wrong("The right two, in the other order: which of them was used longest ago?")
    if names != ["A3", "B2"]:
        return wrong("Write down the five names in the order of their last use, after each line. "
                     "A chain is touched from its last block to its first.")
    return right("A3 was last used by the first prompt, B2 by the second. What is left of both "
                 "chains can still be found, since each lost its end.")


ORDER = Exercise(
    id="11.2", kind="check", title="Who goes first?",
    prompt="A store has room for five records. Three prompts come: blocks A1 A2 A3, then B1 B2, "
           "then A1 A2. After them comes C1 and then D1, each of one new block. Which two records "
           "are evicted, in which order?",
    starter='answer = ...   # as in ("A1", "B2")',
    check=check_order,
    hints=("After the first two prompts the order is A3 A2 A1 B2 B1, the next to go first.",
           "The third prompt moves two names to the end of that order. Which stays in front?"),
    solution='# after A1 A2 A3:  A3 A2 A1\n# after B1 B2:     A3 A2 A1 B2 B1\n'
             '# after A1 A2:     A3 B2 B1 A2 A1\nanswer = ("A3", "B2")',
)

# --- 11.3 ----------------------------------------------------------------------------------


def check_bandwidth(answer: object) -> Verdict:
    needed, sooner = pair_in(answer)
    expected = 12_288 * 3_700 / 1e6
    if math.isclose(needed * expected, 250, rel_tol=0.02) and math.isclose(
            sooner, expected, rel_tol=0.02):
        return wrong("The other way round: first the MB/s, then how many times sooner.")
    if math.isclose(needed, 12_288 / 3_700 / 1e6, rel_tol=0.02) or math.isclose(
            needed, 12_288 / 3_700, rel_tol=0.02):
        return wrong("Bytes a token *times* tokens a second are bytes a second.")
    if math.isclose(needed, expected * 1e6, rel_tol=0.02):
        return wrong("The right number of bytes a second; the task asks for MB/s.")
    if math.isclose(needed, sooner * 250, rel_tol=0.02) and needed > 1:
        return wrong("The first number is right; turn the second around: a disk that is faster "
                     "than it must be makes loading *sooner* than computing.")
    if not math.isclose(needed, expected, rel_tol=0.02):
        return wrong("In the time in which the chip computes one token, the disk must deliver one "
                     "token's notes. Equation 11.1 says it in letters.")
    if not math.isclose(sooner, 250 / expected, rel_tol=0.02):
        return wrong("The bandwidth is right. Loading takes as long as computing at that "
                     "bandwidth; this disk has 250 MB/s. How many times that is it?")
    return right("45.5 MB/s, and 5.5 times sooner. The length of the prompt does not matter: both "
                 "sides grow with it.")


BANDWIDTH = Exercise(
    id="11.3", kind="check", title="Is this disk fast enough?",
    prompt="A model notes 12,288 bytes a token, and its machine reads 3,700 tokens of prompt a "
           "second. From how many MB/s on (a million bytes a second) is loading faster than "
           "computing? And how many times sooner is a long prompt there from a disk that gives "
           "250 MB/s?",
    starter="answer = (..., ...)   # (MB/s, times sooner)",
    check=check_bandwidth,
    hints=("How many bytes of notes does the machine make in a second?",
           "Time is bytes divided by bandwidth: at 250 MB/s instead of the break-even, by what "
           "factor does it shrink?"),
    solution="needed = 12_288 * 3_700 / 1e6\nanswer = (needed, 250 / needed)",
)

# --- 11.4 ----------------------------------------------------------------------------------

SIZE = 531


def made(key: bytes, payload: bytes) -> bytes:
    """A record of exercise 11.4."""
    return struct.pack("<I", zlib.crc32(key + payload)) + key + payload


def spoiled_records() -> Iterator[tuple[str, bytes]]:
    """Records that must be refused when block `k0` is wanted, and what is wrong with each."""
    rng = random.Random(11)
    payload, other = rng.randbytes(SIZE), rng.randbytes(SIZE)
    good = made(b"k" * 32, payload)
    flipped, renamed = bytearray(good), bytearray(good)
    flipped[300] ^= 4
    renamed[20] ^= 1
    yield "whose payload has a flipped bit", bytes(flipped)
    yield "whose own key has a flipped bit", bytes(renamed)
    yield "of another block, whole and undamaged", made(b"q" * 32, other)
    yield "that was cut short by one byte", good[:-1]
    yield "of a shorter block, with a checksum that fits", made(b"k" * 32, payload[:SIZE - 7])
    yield "with bytes behind its end", good + b"xyz"
    yield "of zeros", bytes(len(good))
    yield "of two bytes", good[:2]
    yield "that is empty", b""


def check_reader(answer: object) -> Verdict:
    read = function_in(answer)
    payload = random.Random(11).randbytes(SIZE)
    found = read(made(b"k" * 32, payload), b"k" * 32, SIZE)
    if found is None:
        return wrong("This refuses a record that is in perfect order. Checksum of key and payload, "
                     "32 bytes of key, then the payload.")
    if not isinstance(found, bytes | bytearray | memoryview) or bytes(found) != payload:
        return wrong("Of a good record, hand back the payload, all of it and nothing else.")
    for what, raw in spoiled_records():
        try:
            found = read(raw, b"k" * 32, SIZE)
        except struct.error:
            return wrong(f"A record {what} makes this raise an error. A reader says None: its "
                         "caller computes instead.")
        if found is not None:
            return wrong(f"A record {what} is accepted. Whoever reads it gets notes that are not "
                         "the ones that were asked for.")
    return right("Length, key and checksum: whatever was cut, flipped, renamed or left behind is "
                 "refused, and a refusal is no error.")


READER = Exercise(
    id="11.4", kind="code", title="Believe nothing",
    prompt="Here a record is 4 bytes of CRC-32 (little-endian, of all that follows), 32 bytes of "
           "key, then the payload. `read_record(raw, key, num_bytes)` should return the payload "
           "if this is the whole and undamaged record of that key with that many bytes of payload, "
           "and None otherwise, whatever the bytes are. This one believes too much.",
    starter="""def read_record(raw, key, num_bytes):
    (checksum,) = struct.unpack("<I", raw[:4])
    if zlib.crc32(raw[4:]) != checksum:
        return None
    return raw[36:]""",
    answer="read_record",
    check=check_reader,
    hints=("The checksum says that the bytes are those that were written. Does it say that they "
           "are those that were *asked for*?",
           "Three questions: is the length right, is the key right, does the checksum fit? The "
           "first of them first, since a file of two bytes has no checksum."),
    solution="""def read_record(raw, key, num_bytes):
    if len(raw) != 4 + 32 + num_bytes or raw[4:36] != key:
        return None
    (checksum,) = struct.unpack("<I", raw[:4])
    return raw[36:] if zlib.crc32(raw[4:]) == checksum else None""",
)

# --- 11.5 ----------------------------------------------------------------------------------


class DiskFullError(OSError):
    """What the check's writer meets in the middle of a record."""


def check_publish(answer: object) -> Verdict:
    publish = function_in(answer)
    for test in (appears_at_once, replaces_at_once, fails_cleanly, two_processes):
        with tempfile.TemporaryDirectory() as folder:
            verdict = test(publish, Path(folder))
        if verdict is not None:
            return verdict
    return right("One moment before it nothing, one moment after it everything; a failure leaves "
                 "no trace, and two writers do not meet.")


@contextmanager
def watched(folder: Path) -> Iterator[tuple[list, set]]:
    """What readers find while the code inside runs: the contents of `block`, one after the other
    where they change, and the names of all other files. They look at every call and return."""
    contents, others, before = [], set(), sys.getprofile()

    def look(*_: object) -> None:
        others.update(path.name for path in folder.iterdir() if path.name != "block")
        if (found := content(folder / "block")) not in contents[-1:]:
            contents.append(found)

    sys.setprofile(look)
    try:
        yield contents, others
    finally:
        sys.setprofile(before)
        look()


def content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def appears_at_once(publish: Callable, folder: Path) -> Verdict | None:
    with watched(folder) as (contents, _):
        publish(folder, "block", iter([b"first ", b"second"]))
    if contents[-1] is None:
        return wrong("Afterwards there is no file of that name.")
    if contents[-1] != b"first second":
        return wrong(f"Afterwards the file holds `{contents[-1]!r}`; the pieces were "
                     "`b'first '` and `b'second'`.")
    if len(contents) > 2:
        return wrong(f"While it is written, a reader finds `{contents[1]!r}` under the name, "
                     "and not the whole block. Write under another name first.")
    if left := [path.name for path in folder.iterdir() if path.name != "block"]:
        return wrong(f"Besides the file this leaves {left} behind.")
    return None


def replaces_at_once(publish: Callable, folder: Path) -> Verdict | None:
    (folder / "block").write_bytes(b"old and whole")
    with watched(folder) as (contents, _):
        publish(folder, "block", iter([b"new and ", b"whole"]))
    if contents[-1] != b"new and whole":
        return wrong(f"A record of that name was there before. Afterwards the file holds "
                     f"`{contents[-1]!r}`, not the new pieces.")
    if len(contents) > 2:
        found = "no file" if contents[1] is None else f"`{contents[1]!r}`"
        return wrong(f"A record of that name was there before. For a moment a reader finds {found} "
                     "instead of it or the new one: replace it in one step.")
    return None


def fails_cleanly(publish: Callable, folder: Path) -> Verdict | None:
    def pieces() -> Iterator[bytes]:
        yield b"half"
        raise DiskFullError("no space left")

    (folder / "block").write_bytes(b"old and whole")
    try:
        publish(folder, "block", pieces())
    except DiskFullError:
        pass
    else:
        return wrong("The disk was full in the middle of a record, and the caller was not told: "
                     "let the error pass.")
    if content(folder / "block") != b"old and whole":
        return wrong("A write that failed has destroyed the record that was there before.")
    if len(list(folder.iterdir())) > 1:
        return wrong("After a write that failed, its unfinished file still lies there. With a "
                     "full disk, that makes things worse.")
    return None


def two_processes(publish: Callable, folder: Path) -> Verdict | None:
    """One after the other, as two processes would do it: which other names do they use?"""
    used = []
    for process in (7_001, 7_002):
        with patch("os.getpid", return_value=process), watched(folder) as (_, others):
            publish(folder, "block", iter([b"1234", b"56"]))
        used.append(others)
    if shared := used[0] & used[1]:
        return wrong(f"Two processes that save the same block both write to `{shared.pop()}`, and "
                     "would write into each other's file. Take a name that nobody else has.")
    return None


PUBLISH = Exercise(
    id="11.5", kind="code", title="Appear whole",
    prompt="`publish(folder, name, pieces)` writes the pieces (bytes, one after the other) as the "
           "file `folder / name`. The file should appear at one moment, with all pieces in it. If "
           "a piece cannot be had, the error should pass through, and nothing may have changed in "
           "the folder. And two processes may do this with the same name at the same time.",
    starter="""def publish(folder, name, pieces):
    with (folder / name).open("wb") as file:
        for piece in pieces:
            file.write(piece)""",
    answer="publish",
    check=check_publish,
    hints=("Write to a name that nobody else has, `uuid.uuid4().hex` say, in the same folder.",
           "`Path.replace` gives a file its name in one step. Whatever happens, `finally` runs: "
           "`Path.unlink(missing_ok=True)`."),
    solution="""import uuid


def publish(folder, name, pieces):
    temporary = folder / f"{uuid.uuid4().hex}.tmp"
    try:
        with temporary.open("xb") as file:
            for piece in pieces:
                file.write(piece)
        temporary.replace(folder / name)
    finally:
        temporary.unlink(missing_ok=True)""",
)

# --- 11.6 ----------------------------------------------------------------------------------

DAY = 86_400
NOW = 20_000 * DAY


def check_keep(answer: object) -> Verdict:
    keep = function_in(answer)
    entries = {"fresh": (NOW - 5, 3 * DAY), "just": (NOW - 3 * DAY, 3 * DAY),
               "stale": (NOW - 3 * DAY - 7, 3 * DAY), "chat": (NOW - 6 * DAY, 7 * DAY)}
    found = keep(dict(entries), NOW)
    if not isinstance(found, dict):
        return wrong("Hand back a dict: what is kept, {name: (last used, retention)}.")
    if "stale" in found:
        return wrong("A record last used three days and 7 seconds ago, kept for three days, should "
                     "be gone.")
    if missing := {"fresh", "just", "chat"} - found.keys():
        return wrong(f"{', '.join(sorted(missing))} should be kept: its retention is not over. "
                     "Each record has its own.")
    if any(tuple(found[name]) != entries.get(name) for name in found):
        return wrong("Looking is not using: what is kept should keep its time of last use.")
    return future_verdict(keep)


def future_verdict(keep: Callable) -> Verdict:
    """A clock was once years ahead; now it is right, and days go by."""
    entries = {"ahead": (NOW + 3_650 * DAY, 3 * DAY), "soon": (NOW + 20, 3 * DAY)}
    for day in range(9):
        entries = keep(dict(entries), NOW + day * DAY)
        if day == 1 and entries.keys() != {"ahead", "soon"}:
            return wrong("A day later both records should still be there: a wrong time is no "
                         "reason to lose a block that was just saved.")
    if "ahead" in entries:
        return wrong("A machine's clock was ten years ahead when it saved a record. Nine days "
                     "later the record is still there, and it will be for ten years.")
    if entries:
        return wrong("A time a few seconds ahead is normal between two machines. Nine days later "
                     "its record should be gone as well.")
    return right("A time in the future can only be a mistake; taken as now, it expires like any "
                 "other.")


KEEP = Exercise(
    id="11.6", kind="code", title="A clock that ran ahead",
    prompt="`keep(entries, now)` gets records as {name: (last used, retention)}, all in seconds, "
           "and should return those that are still to be kept, in the same form. It is called "
           "again and again, each time with what it returned before. One day a machine's clock "
           "ran ten years ahead, and what it saved then is never removed. Mend that: a record "
           "whose last use lies more than a minute in the future counts as used now.",
    starter="""def keep(entries, now):
    return {name: (used, retention)
            for name, (used, retention) in entries.items()
            if now - used <= retention}""",
    answer="keep",
    check=check_keep,
    hints=("For a time in the future, `now - used` is negative, and stays so for ten years.",
           "Replace such a time by `now` in what you return: the next call then sees it age."),
    solution="""def keep(entries, now):
    mended = {name: (now if used > now + 60 else used, retention)
              for name, (used, retention) in entries.items()}
    return {name: (used, retention)
            for name, (used, retention) in mended.items()
            if now - used <= retention}""",
)

# --- 11.7 ----------------------------------------------------------------------------------


def check_days(answer: object) -> Verdict:
    days = number_in(answer)
    expected = math.log(10) / 0.4
    if math.isclose(days, math.log(10) * 0.4, rel_tol=0.02):
        return wrong("Turn it around: the rarer the use, the longer the time. Divide by the rate.")
    if days == 6:
        return wrong("Six whole days do, but the least time is shorter: do not round it.")
    if math.isclose(days, math.log(10), rel_tol=0.02):
        return wrong("That is the answer for one use a day. Here it is two uses in five days.")
    if math.isclose(days, math.log(10) / 2.5, rel_tol=0.02):
        return wrong("2.5 days is the mean time between uses. What is the rate, in uses a day?")
    if math.isclose(days, 0.9 / 0.4, rel_tol=0.02) or math.isclose(days, 0.9 * 2.5, rel_tol=0.02):
        return wrong("A straight line would give that. The hit rate flattens: equation 11.2.")
    if math.isclose(days, -math.log(0.9) / 0.4, rel_tol=0.02):
        return wrong("With that, nine of ten would be *missed*. Which share may still be missing?")
    if not math.isclose(days, expected, rel_tol=0.02):
        return wrong("Set 1 - exp(-rate x days) to 0.9 and solve for the days.")
    return right("5.8 days. The next nine hundredths, to 99 %, would take as long again: that is "
                 "what a flat curve means.")


DAYS = Exercise(
    id="11.7", kind="check", title="How many days for nine of ten?",
    prompt="A prompt's notes are wanted at random, twice in five days on average. For how many "
           "days after its last use must the store keep them so that nine of ten uses find them? "
           "(Equation 11.2.)",
    starter="answer = ...   # days",
    check=check_days,
    hints=("The rate is 0.4 uses a day.",
           "One tenth is still missing when exp(-0.4 T) = 0.1."),
    solution="import math\n\nanswer = math.log(10) / 0.4",
)

# --- 11.8 ----------------------------------------------------------------------------------

PRIVATE = Exercise(
    id="11.8", kind="think", title="Delete my prompt",
    prompt="A customer deletes a conversation and asks whether it is gone. Name three places where "
           "it may still be, in this chapter's design. Can notes be turned back into text? And "
           "would the checksum stop somebody who *wants* to plant a wrong record?",
    solution="**Where it may be**: in records on disk, until they are evicted or expire, and each "
             "use by somebody with the same beginning starts the time again; in the blocks of "
             "engines' memory; in the file system's free space, since removing a file does not "
             "wipe it; on copies and backups.\n\n"
             "**Back into text**: assume yes. The first layer's keys and values are computed from "
             "one token each, so they can be compared with those of every token there is. Notes "
             "are as private as the prompt.\n\n"
             "**A forger** computes a checksum like anybody else: CRC-32 is against accidents. "
             "Against intent one needs a secret, as in a keyed digest (HMAC) or encryption; and "
             "before that, permissions, so that nobody else can write into the directory.\n\n"
             "A key for each customer helps with all three: what is encrypted under it can be "
             "deleted by throwing the key away. The price is that customers share nothing.",
)

CHAPTER = Chapter(11, "Notes on disk",
                  [FILES, ORDER, BANDWIDTH, READER, PUBLISH, KEEP, DAYS, PRIVATE],
                  given="import struct\nimport zlib")
