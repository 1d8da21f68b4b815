"""What the server has done and how it is, as text that Prometheus reads.

A counter only grows, a gauge goes up and down.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from ..engine.engine import usage
from ..engine.request import Request

GAUGES = {"waiting": "requests that wait for blocks", "loading": "requests that read from disk",
          "running": "requests in the batch", "blocks": "blocks of the cache",
          "held": "blocks that requests hold", "free": "blocks that nobody holds",
          "cached": "free blocks whose notes can still be found"}


class Counts:
    """Grows with every request that ends; the engines' thread counts."""

    def __init__(self):
        self.answers: Counter[str] = Counter()      # by their reason to end
        self.prompt: Counter[str] = Counter()       # tokens, by where their notes were found
        self.num_written = self.num_first = 0
        self.first_s = 0.0

    def landed(self, request: Request, reasons: Iterable[str]) -> None:
        """A request has ended: these are its answers' reasons."""
        used = usage(request)
        self.answers.update(reasons)
        self.prompt.update(memory=used.hit_tokens - used.disk_hit_tokens,
                           disk=used.disk_hit_tokens, nowhere=used.miss_tokens)
        self.num_written += used.output_tokens
        if request.token_times_s:
            self.num_first += 1
            self.first_s += request.token_times_s[0] - request.arrived_s


def prometheus(counts: Counts, refused: Mapping[str, int], is_up: Mapping[str, bool],
               stats: Mapping[str, Mapping[str, int]]) -> str:
    """The page of metrics. `is_up` tells which replicas serve, `stats` how those are."""
    return "\n".join([
        *family("answers_total", "counter", "answers that ended", "reason", counts.answers),
        *family("refused_total", "counter", "requests refused", "code", refused),
        *family("prompt_tokens_total", "counter", "prompt tokens, by where their notes were found",
                "found", counts.prompt),
        *family("output_tokens_total", "counter", "tokens written", "", {"": counts.num_written}),
        *family("time_to_first_token_seconds", "summary", "from arrival to the first token", "",
                {"_sum": counts.first_s, "_count": counts.num_first}),
        *family("replica_up", "gauge", "whether the replica serves", "replica", is_up),
        *(line for name, text in GAUGES.items() for line in family(
            name, "gauge", text, "replica", {replica: of[name] for replica, of in stats.items()})),
        ""])


def family(name: str, kind: str, text: str, label: str, values: Mapping[str, float]
           ) -> Iterator[str]:
    """One metric's lines. Without a label, the values' keys are endings of the name."""
    yield f"# HELP minimodel_{name} {text}"
    yield f"# TYPE minimodel_{name} {kind}"
    for key, value in values.items():
        place = f'{name}{{{label}="{key}"}}' if label else f"{name}{key}"
        yield f"minimodel_{place} {value if isinstance(value, float) else int(value)}"
