"""A conversation as token ids: the turns the toy was trained on.

    <|start|> <|system|> text <|turn|> <|user|> text <|turn|> <|assistant|>

The model goes on from there, and ends its own turn with <|turn|>. When that turn is sent back,
its text becomes the very ids that were generated: a text is its bytes, and the marks stand where
the model put them. So a second request finds the notes of the first one's prompt and of its
answer. A template that writes a turn otherwise, by one space, misses at every turn.
"""

from collections.abc import Iterable

from ..tokenizer import ASSISTANT, START, SYSTEM, TOOL, TURN, USER, encode

MARKS = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT,
         "tool": TOOL}


def conversation(turns: Iterable[tuple[str, str]]) -> list[int]:
    """The ids of (role, text) turns, up to where the assistant's next one begins."""
    ids = [START]
    for role, text in turns:
        ids += [MARKS[role], *encode(text, start=False), TURN]
    return [*ids, ASSISTANT]
