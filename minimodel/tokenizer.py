"""Bytes to token ids and back. Byte b has id b; eight ids above 255 mark structure.

No vocabulary is learned: a prompt of n bytes is n tokens, so every chapter can count
tokens by counting bytes. The price is length: a production vocabulary packs three to
four bytes into a token.
"""

from collections.abc import Iterable

SPECIAL_TOKENS = ("<|pad|>", "<|start|>", "<|end|>", "<|system|>",
                  "<|user|>", "<|assistant|>", "<|tool|>", "<|turn|>")
PAD, START, END, SYSTEM, USER, ASSISTANT, TOOL, TURN = range(256, 264)
VOCAB_SIZE = 264
STOP_IDS = frozenset({END, TURN})       # END closes an answer, TURN a turn of a dialogue


def encode(text: str | bytes, start: bool = True) -> list[int]:
    """Token ids of `text` (a string is taken as UTF-8), after the start token by default.

    Marks such as `<|end|>` inside the text stay ordinary bytes: a prompt cannot forge one.
    """
    data = text.encode() if isinstance(text, str) else bytes(memoryview(text))  # no number, no list
    return [START, *data] if start else list(data)


def decode_bytes(ids: Iterable[int]) -> bytes:
    """The bytes that `ids` stand for; special tokens leave nothing behind.

    Raises ValueError for an id outside the vocabulary.
    """
    out = bytearray()
    for token in ids:
        if not 0 <= token < VOCAB_SIZE:
            raise ValueError(f"token id {token} is outside the vocabulary (0 to {VOCAB_SIZE - 1})")
        if token < 256:
            out.append(token)
    return bytes(out)


def decode(ids: Iterable[int]) -> str:
    """`decode_bytes` as text; bytes that are not UTF-8 show as the replacement mark."""
    return decode_bytes(ids).decode("utf-8", errors="replace")
