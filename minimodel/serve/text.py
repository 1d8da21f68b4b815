"""From tokens to the text that a client is sent, piece by piece.

A token is a byte, and two things may have to wait for the next one: the beginning of a character
of several bytes, and what may be the beginning of a stop string, which no client shall see.

    bytes so far    c a f \\xc3          stop string "\\n\\n":    y e s \\n
    sent            c a f                                       y e s
    held back             \\xc3                                        \\n
"""

import codecs
from collections.abc import Sequence


class TextWriter:
    """Turns an answer's bytes into text, up to the first of some stop strings.

    The pieces together are the text that all the bytes decode to: bytes that are no UTF-8, and
    only those, show as the replacement mark.
    """

    def __init__(self, stops: Sequence[bytes] = ()):
        self.stops, self.has_stopped = stops, False
        self.held = b""                         # may become a stop string
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, data: bytes) -> str:
        """The text that can be sent after one more token's bytes."""
        if self.has_stopped:
            return ""
        self.held += data
        found = [place for stop in self.stops if (place := self.held.find(stop)) >= 0]
        self.has_stopped = bool(found)
        end = min(found) if found else len(self.held) - self._longest_beginning()
        sent, self.held = self.held[:end], b"" if found else self.held[end:]
        return self.decoder.decode(sent)

    def _longest_beginning(self) -> int:
        """How many of the last bytes may be the beginning of a stop string."""
        return max((size for stop in self.stops for size in range(1, len(stop))
                    if self.held.endswith(stop[:size])), default=0)

    def finish(self) -> str:
        """What was held back, now that no token follows."""
        return self.decoder.decode(self.held, final=True)
