"""What clients send and are sent: the JSON of OpenAI's API, with DeepSeek's usage.

Taken are the parameters that an ordinary client needs. One of IGNORED changes nothing here and
is let pass; one of NEUTRAL, too, as long as it asks for nothing. Any other is refused by its
name: a client shall never believe that something was done which was not. `null` means absent.
"""

import json
import secrets
import time
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ..engine.request import Sampling
from ..pricing import Usage
from ..tokenizer import VOCAB_SIZE, encode
from .chat import MARKS, conversation
from .errors import ApiError, bad_request

DEFAULT_MAX_TOKENS = 64             # a byte each; the toy's answers are shorter
IGNORED = {"user", "metadata", "name", "tool_call_id"}          # the last two, of a message
NEUTRAL = {"frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "best_of": 1,
           "logprobs": False, "echo": False, "suffix": "", "tools": [], "tool_choice": "none",
           "response_format": {"type": "text"}}


# --- requests --------------------------------------------------------------------------------


class Strict(BaseModel):
    """Nothing unknown, nothing of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def leave_out_what_asks_for_nothing(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items()
                if value is not None and name not in IGNORED and not is_neutral(name, value)}


def is_neutral(name: str, value: object) -> bool:
    neutral = NEUTRAL.get(name)
    return (neutral is not None and value == neutral
            and isinstance(value, bool) == isinstance(neutral, bool))


def as_list(stop: object) -> object:
    return [stop] if isinstance(stop, str) else stop


def one_prompt(prompt: object) -> object:
    """A text, or token ids. An array of several prompts is refused."""
    is_ids = isinstance(prompt, list) and all(
        type(token) is int and 0 <= token < VOCAB_SIZE for token in prompt)
    if not is_ids and not isinstance(prompt, str):
        raise ValueError(f"must be one text, or a list of token ids from 0 to {VOCAB_SIZE - 1}: "
                         "send one request for each prompt")
    if not prompt:
        raise ValueError("is empty: give at least one byte")
    return prompt


def one_text(content: object) -> object:
    """A message's text, or the texts of its parts, put together."""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        if any(part.keys() != {"type", "text"} or part["type"] != "text"
               or not isinstance(part["text"], str) for part in content):
            raise ValueError("has a part that is no text, and this model reads text only: "
                             'send parts {"type": "text", "text": ...}')
        return "".join(part["text"] for part in content)
    return content


class StreamOptions(Strict):
    include_usage: bool = False


class Body(Strict):
    """What both kinds of request have in common."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(0.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-2**63, lt=2**63)
    n: int = Field(1, ge=1, le=128)
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(as_list),
                    Field(max_length=4)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def has_options_only_of_a_stream(self) -> "Body":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options belong to a stream: set stream to true, or leave "
                             "them out")
        return self

    @property
    def most(self) -> int | None:
        """Tokens to write at most, if the client says."""
        return self.max_tokens

    def sampling(self, room: int) -> Sampling:
        """How to choose tokens, where there is `room` for so many. Without a seed, by chance.

        Raises ApiError for a temperature that the engine cannot take.
        """
        most = min(DEFAULT_MAX_TOKENS, max(1, room)) if self.most is None else self.most
        seed = secrets.randbelow(2**63) if self.seed is None else self.seed
        try:
            return Sampling(most, self.temperature, top_p=self.top_p, seed=seed)
        except ValueError as error:
            raise bad_request(str(error), str(error).partition("=")[0], "invalid_value") from None


class CompletionBody(Body):
    """A text to go on with."""

    prompt: Annotated[str | list[int], BeforeValidator(one_prompt)]

    def tokens(self) -> list[int]:
        """A text begins with the start token. Ids are taken as they are."""
        return encode(self.prompt) if isinstance(self.prompt, str) else self.prompt


class Message(Strict):
    role: Literal[tuple(MARKS)]
    content: Annotated[str, BeforeValidator(one_text)]


class ChatBody(Body):
    """A conversation, in which the assistant has the next turn."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    @property
    def most(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def tokens(self) -> list[int]:
        return conversation((message.role, message.content) for message in self.messages)


def parse(kind: type[Body], raw: bytes) -> Body:
    """A request from its JSON. Raises ApiError that names the first thing that is wrong."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise explain(error.errors(include_url=False)[0], kind) from None


def explain(wrong: dict, kind: type[Body]) -> ApiError:
    where = ".".join(map(str, wrong["loc"]))
    what = wrong["msg"].removeprefix("Value error, ")
    if wrong["type"] == "json_invalid":
        return bad_request(f"the body is no JSON ({what.removeprefix('Invalid JSON: ')}): send a "
                           "JSON object", code="invalid_json")
    if wrong["type"] == "extra_forbidden":
        known = f", which takes {', '.join(kind.model_fields)}" if "." not in where else ""
        return bad_request(f"{where} is not supported by this server{known}: leave it out", where,
                           "unsupported_parameter")
    if wrong["type"] == "missing":
        return bad_request(f"{where} is missing: it is required", where, "missing_parameter")
    given = json.dumps(wrong["input"], default=str)
    if len(given) > 60:
        given = f"{given[:56]} ..."
    message = f"{where}={given}: {what}" if where else what
    return bad_request(message, where or None, "invalid_value")


# --- answers ---------------------------------------------------------------------------------


def usage_fields(usage: Usage) -> dict:
    """A usage as DeepSeek's API reports it: `Usage.from_api` reads it back (claim P-KV03).

    `cached_tokens` is OpenAI's name for the hits. How many of them came from disk, no public API
    tells: the last field is our own.
    """
    return {"prompt_tokens": usage.input_tokens,
            "completion_tokens": usage.output_tokens,
            "total_tokens": usage.input_tokens + usage.output_tokens,
            "prompt_cache_hit_tokens": usage.hit_tokens,
            "prompt_cache_miss_tokens": usage.miss_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.hit_tokens},
            "prompt_cache_disk_hit_tokens": usage.disk_hit_tokens}


def event(message: dict | str) -> str:
    """One server-sent event."""
    data = message if isinstance(message, str) else json.dumps(message, separators=(",", ":"))
    return f"data: {data}\n\n"


@dataclass
class Reply:
    """The frame of all that one request is answered with: its id, when, by which model."""

    model: str
    fingerprint: str = ""
    with_usage: bool = False            # in a stream: its last event tells the usage
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def frame(self, kind: str, choices: list[dict], **more: object) -> dict:
        return {"id": f"{self.prefix}-{self.id}", "object": kind, "created": self.created,
                "model": self.model, "system_fingerprint": self.fingerprint, "choices": choices,
                **more}

    def complete(self, texts: list[str], reasons: list[str], usage: Usage) -> dict:
        """The answer to a request without stream."""
        choices = [self.choice(index, text, reason) for index, (text, reason)
                   in enumerate(zip(texts, reasons, strict=True))]
        return self.frame(self.whole, choices, usage=usage_fields(usage))

    def piece(self, index: int, text: str, reason: str | None) -> str:
        """An event with a piece of one answer; the last one has the reason to end."""
        unknown = {"usage": None} if self.with_usage else {}
        return event(self.frame(self.part, [self.delta(index, text, reason)], **unknown))

    def end(self, usage: Usage) -> str:
        """The last events of a stream."""
        used = event(self.frame(self.part, [], usage=usage_fields(usage)))
        return (used if self.with_usage else "") + event("[DONE]")

    def choice(self, index: int, text: str, reason: str | None) -> dict:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}

    delta = choice


@dataclass
class ChatReply(Reply):
    """The same for a conversation. The first piece of each answer says whose turn it is."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"
    introduced: set[int] = field(default_factory=set)       # answers that have had a piece

    def choice(self, index: int, text: str, reason: str | None) -> dict:
        return {"index": index, "message": {"role": "assistant", "content": text},
                "logprobs": None, "finish_reason": reason}

    def delta(self, index: int, text: str, reason: str | None) -> dict:
        role = {} if index in self.introduced else {"role": "assistant"}
        self.introduced.add(index)
        return {"index": index, "delta": {**role, "content": text},
                "logprobs": None, "finish_reason": reason}
