"""The routes, spoken to in this process without a network: answers, limits, errors, keys."""

import asyncio
import json
import re

import httpx
import pytest

from minimodel.engine.request import Sampling
from minimodel.engine.scheduler import Limits
from minimodel.serve.api import events as event_lines
from minimodel.serve.api import make_app
from minimodel.serve.errors import ClientLeftError
from minimodel.serve.job import Job, News, Piece
from minimodel.serve.messages import Reply
from minimodel.serve.tenants import Tenant, Tenants
from minimodel.tokenizer import START, decode, encode

pytestmark = pytest.mark.timeout(180)
PROMPT = "The code of the red door is 4821.\nQ: What is the code of the red door?\n"
TENANTS = Tenants({"sk-1": Tenant("ann"), "sk-2": Tenant("ann"), "sk-3": Tenant("ben", "agent")})


@pytest.fixture
def site(make_site):
    return make_site()[0]


@pytest.fixture
def talk():
    """Sends requests to a site, one after another: (method, path, body, key) each."""
    async def send(site, asked):
        transport = httpx.ASGITransport(make_app(site), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return [await client.request(method, path, headers=headers(key), **content(body))
                    for method, path, body, key in asked]

    def run(site, *asked):
        with site.service:
            answers = asyncio.run(send(site, asked))
            asyncio.run(site.service.bridge.result_of(site.service.check))
        return answers
    return run


def headers(key):
    return {"authorization": f"Bearer {key}"} if key else {}


def content(body):
    if body is None:
        return {}
    return {"content": body} if isinstance(body, bytes) else {"json": body}


def completion(prompt=PROMPT, key=None, **more):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 20} | more
    return "POST", "/v1/completions", body, key


def chat(*texts, key=None, **more):
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    body = {"model": "tiny", "messages": messages, "max_tokens": 20} | more
    return "POST", "/v1/chat/completions", body, key


def hits(answer):
    return answer.json()["usage"]["prompt_cache_hit_tokens"]


def error_of(answer):
    """The error, which has OpenAI's four fields whatever it is."""
    assert answer.headers["content-type"] == "application/json"
    assert answer.json().keys() == {"error"}
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


# --- answers -----------------------------------------------------------------------------------


def test_a_completion_is_what_an_engine_writes(site, talk, slow_text):
    answer, = talk(site, completion())
    assert answer.status_code == 200
    body = answer.json()
    assert body["choices"] == [{"index": 0, "text": slow_text(PROMPT), "logprobs": None,
                                "finish_reason": "length"}]
    assert (body["object"], body["model"]) == ("text_completion", "tiny")
    assert body["id"].startswith("cmpl-")
    assert body["system_fingerprint"] == site.service.fingerprint[:12]
    assert body["usage"] == {
        "prompt_tokens": 72, "completion_tokens": 20, "total_tokens": 92,
        "prompt_cache_hit_tokens": 0, "prompt_cache_miss_tokens": 72,
        "prompt_tokens_details": {"cached_tokens": 0}, "prompt_cache_disk_hit_tokens": 0}


def test_ids_are_a_prompt_too(site, talk, slow_text):
    text, ids = talk(site, completion(), completion(encode(PROMPT)))
    assert ids.json()["choices"] == text.json()["choices"]
    assert hits(ids) == 64


def test_a_chat_is_what_an_engine_writes_after_the_template(site, talk, slow):
    answer, = talk(site, chat("Who?"))
    ids = [START, 260, *b"Who?", 263, 261]
    assert answer.json()["choices"] == [{
        "index": 0, "message": {"role": "assistant", "content": decode(slow(ids))},
        "logprobs": None, "finish_reason": "length"}]
    assert answer.json()["object"] == "chat.completion"


def test_a_seed_decides_what_chance_writes(site, talk, slow_text):
    how = {"temperature": 1.5, "top_p": 0.9, "seed": 5}
    first, again, other = talk(site, completion(**how), completion(**how),
                               completion(**(how | {"seed": 6})))
    assert first.json()["choices"][0]["text"] == slow_text(PROMPT, **how)
    assert again.json()["choices"] == first.json()["choices"]
    assert other.json()["choices"] != first.json()["choices"]


def test_several_answers_pay_for_the_prompt_once(site, talk, slow_text):
    how = {"temperature": 1.5, "seed": 5}
    answer, = talk(site, completion(n=3, **how))
    texts = [slow_text(PROMPT, temperature=1.5, seed=seed) for seed in (5, 6, 7)]
    assert [choice["text"] for choice in answer.json()["choices"]] == texts
    usage = answer.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (72, 60)


def scripted(monkeypatch, *texts):
    """Let the model write given texts, each answer its own, each with a mark at the end."""
    lines = [[*encode(text, start=False), 263] for text in texts]

    def choose(logits, requests):
        def token(number, request):
            return lines[number][len(request.output)]
        return [[token(int(request.id.partition("/")[2] or 0) + extra, request)
                 for extra in range(request.num_answers)] for request in requests]
    monkeypatch.setattr("minimodel.engine.engine.choose", choose)


def test_a_stop_string_ends_one_answer_and_is_not_sent(site, talk, monkeypatch):
    scripted(monkeypatch, "é no more", "nothing", "a no", "none")
    answer, = talk(site, completion(n=4, stop=[" no", "oth"]))
    choices = [(choice["text"], choice["finish_reason"]) for choice in answer.json()["choices"]]
    assert choices == [("é", "stop"), ("n", "stop"), ("a", "stop"), ("none", "stop")]
    assert answer.json()["usage"]["completion_tokens"] == 5 + 4 + 4 + 5


def events(answer):
    lines = [line for line in answer.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_stream_s_pieces_are_the_answer(site, talk, slow_text):
    answer, = talk(site, completion(stream=True))
    assert answer.headers["content-type"].startswith("text/event-stream")
    pieces = events(answer)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == slow_text(PROMPT)
    assert [piece["choices"][0]["finish_reason"] for piece in pieces[-2:]] == [None, "length"]
    assert len({piece["id"] for piece in pieces}) == 1
    assert not any("usage" in piece for piece in pieces)


def test_a_stream_s_last_event_tells_the_usage_if_asked(site, talk):
    whole, stream = talk(site, completion(), completion(
        stream=True, stream_options={"include_usage": True}))
    *pieces, last = events(stream)
    assert all(piece["usage"] is None for piece in pieces)
    assert last["choices"] == []
    assert last["usage"] == whole.json()["usage"] | {
        "prompt_cache_hit_tokens": 64, "prompt_cache_miss_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 64}}


def test_a_stream_of_several_chat_answers_keeps_them_apart(site, talk, monkeypatch):
    scripted(monkeypatch, "é☕", "abc")
    answer, = talk(site, chat("Who?", n=2, stream=True))
    told = {0: [], 1: []}
    for piece in events(answer):
        assert piece["object"] == "chat.completion.chunk"
        choice, = piece["choices"]
        told[choice["index"]].append((choice["delta"], choice["finish_reason"]))
    assert told == {
        0: [({"role": "assistant", "content": "é"}, None), ({"content": "☕"}, None),
            ({"content": ""}, "stop")],
        1: [({"role": "assistant", "content": "a"}, None), ({"content": "b"}, None),
            ({"content": "c"}, None), ({"content": ""}, "stop")]}


def test_half_a_character_at_the_end_is_marked(site, talk, monkeypatch):
    scripted(monkeypatch, "aé")
    whole, stream = talk(site, completion(max_tokens=2), completion(max_tokens=2, stream=True))
    assert whole.json()["choices"][0]["text"] == "a�"
    assert "".join(piece["choices"][0]["text"] for piece in events(stream)) == "a�"


def test_a_stream_whose_client_has_just_left_ends_without_a_word():
    async def told():
        job = Job(encode("x"), Sampling())
        job.inbox.put(ClientLeftError())
        first = News([Piece(0, "a")])
        return [line async for line in event_lines(first, job, Reply("tiny"))]
    assert len(asyncio.run(told())) == 1


# --- reuse -------------------------------------------------------------------------------------


def test_g27_a_second_turn_finds_what_the_first_one_wrote(site, talk, monkeypatch):
    """All of the first turn was computed but its last mark: so many whole blocks are found."""
    first = "Tell me of the mill, the lamp and the well."
    said = "I know of a mill, of two lamps and, until last winter, of one well."
    scripted(monkeypatch, said)
    answer, again = talk(site, chat(first, max_tokens=100),
                         chat(first, said, "And the oar?", max_tokens=1))
    assert answer.json()["choices"][0]["message"] == {"role": "assistant", "content": said}
    used = answer.json()["usage"]
    assert used["completion_tokens"] == len(said) + 1
    known = used["prompt_tokens"] + used["completion_tokens"] - 1
    assert hits(again) == known // 16 * 16
    assert hits(again) > used["prompt_tokens"]


def test_g28_a_clock_at_the_head_finds_nothing_and_at_the_end_nearly_all(site, talk):
    def ask(clock, at_the_end):
        parts = [f"It is {clock}. ", "You are Bo. Be brief. " * 3]
        system = "".join(reversed(parts) if at_the_end else parts)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "Who?"}]
        return "POST", "/v1/chat/completions", {
            "model": "tiny", "max_tokens": 1, "messages": messages}, None
    clocks = ("10:01", "11:02", "12:03")
    at_the_head = talk(site, *(ask(clock, False) for clock in clocks))
    assert [hits(answer) for answer in at_the_head] == [0, 0, 0]


def test_g28_a_clock_at_the_end_costs_little(site, talk):
    system = "You are Bo. Be brief. " * 3
    answers = talk(site, *(chat(f"{system}It is {clock}.", max_tokens=1)
                           for clock in ("10:01", "11:02", "12:03")))
    assert [hits(answer) for answer in answers] == [0, 64, 64]


def test_g26_tenants_find_nothing_of_each_other_whatever_they_send(make_site, talk):
    site, _ = make_site(TENANTS)
    anns, stranger, liar, salted, other_key, again = talk(
        site, completion(key="sk-1"), completion(key="sk-3"), completion(key="sk-3", user="ann"),
        completion(key="sk-3", cache_salt="ann"), completion(key="sk-2"), completion(key="sk-3"))
    assert [hits(answer) for answer in (anns, stranger)] == [0, 0]
    assert hits(liar) == hits(again) == 64              # its own
    assert error_of(salted)["param"] == "cache_salt"
    assert hits(other_key) == 64                        # of the same tenant


def test_g26_what_one_tenant_left_on_disk_is_not_the_other_s(make_site, talk, tmp_path):
    talk(make_site(TENANTS, store=tmp_path)[0], completion(key="sk-1"))
    stranger, ann = talk(make_site(TENANTS, store=tmp_path)[0],
                         completion(key="sk-3"), completion(key="sk-2"))
    assert (hits(stranger), hits(ann)) == (0, 64)
    assert ann.json()["usage"]["prompt_cache_disk_hit_tokens"] == 64


def test_how_long_notes_are_kept_is_the_tenant_s(make_site, talk, tmp_path):
    site, _ = make_site(TENANTS, store=tmp_path)
    talk(site, completion(key="sk-1"), completion("Another prompt, of the robot's", key="sk-3"))
    store = site.service.replicas["0"].engine.store
    assert {entry.ttl_s for entry in store.index.entries.values()} == {3 * 86_400, 7 * 86_400}


# --- limits and errors -------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "status", "code", "message"), [
    (completion(model="gpt"), 404, "model_not_found", "model='gpt' is not here: .* has 'tiny'"),
    (chat("x", model=""), 404, "model_not_found", "model='' is not here"),
    (("GET", "/v1/models/gpt", None, None), 404, "model_not_found", "'gpt' is not here"),
    (completion("x" * 390), 400, "context_length_exceeded",
     "391 tokens of prompt and 20 of answer go beyond the context of 403: shorten the prompt, or"),
    (completion("x" * 390, max_tokens=None), 200, None, None),
    (completion("x" * 403, max_tokens=None), 400, "context_length_exceeded", "404 .* and 1 of an"),
    (completion(max_tokens=10**9), 400, "context_length_exceeded", "1000000000 of answer"),
    (completion(n=65), 400, "rejected", "65 answers at a time are over the limit of 64 running"),
    (completion(temperature=0.001), 400, "invalid_value", "temperature=0.001 must be 0 "),
    (completion(""), 400, "invalid_value", "is empty"),
    (completion(foo=1), 400, "unsupported_parameter", "foo is not supported"),
    (completion(max_tokens="many"), 400, "invalid_value", 'max_tokens="many"'),
    (chat("x", messages=[]), 400, "invalid_value", "at least 1 item"),
    (("POST", "/v1/completions", b"{", None), 400, "invalid_json", "the body is no JSON"),
    (("POST", "/v1/completions", b"", None), 400, "invalid_json", "the body is no JSON"),
    (("POST", "/v1/completions", b"x" * 5_001, None), 413, "body_too_large",
     "a body of 5001 bytes or more is over the limit of 5000: shorten the prompt"),
    (("POST", "/v1/completions", b"x" * 200_000, None), 413, "body_too_large", "over the limit"),
    (("GET", "/v1/completions", None, None), 405, "no_such_route", "Method Not Allowed"),
    (("POST", "/v1/embeddings", {}, None), 404, "no_such_route", "POST /v1/embeddings: Not Found"),
    (("GET", "/", None, None), 404, "no_such_route", "GET /: Not Found")])
def test_each_kind_of_bad_input(site, talk, asked, status, code, message):
    answer, still_served = talk(site, asked, completion("x", max_tokens=1))
    assert answer.status_code == status
    if status != 200:
        error = error_of(answer)
        assert (error["code"], error["type"]) == (code, "invalid_request_error")
        assert re.search(message, error["message"]), error["message"]
        assert site.service.refused == {code: 1}
    assert still_served.status_code == 200


def test_a_request_that_the_cache_could_never_hold_is_refused(make_site, talk):
    answer, = talk(make_site(num_blocks=4)[0], completion())
    assert answer.status_code == 400
    assert "all 4 blocks together hold 64; shorten it" in error_of(answer)["message"]


@pytest.mark.parametrize(("num_pieces", "num_read"), [(3, 3), (8, 8), (100, 81)])
def test_what_is_too_much_is_thrown_away_unless_it_never_ends(site, num_pieces, num_read):
    """A client that is still sending does not hear us, so it is let finish, within limits."""
    left, sent = [b" " * 1_000] * num_pieces, []

    async def receive():
        if not left:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": left.pop(), "more_body": bool(left)}

    async def send(message):
        sent.append(message)
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [],
             "query_string": b"", "raw_path": b"", "http_version": "1.1", "scheme": "http"}
    asyncio.run(make_app(site)(scope, receive, send))
    assert num_pieces - len(left) == num_read
    assert sent[0]["status"] == (400 if num_pieces == 3 else 413)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_without_a_key_no_body_is_read(make_site, talk, path):
    site, _ = make_site(TENANTS)
    no_key, wrong = talk(site, ("POST", path, b"{", None), ("POST", path, b"{", "sk-9"))
    for answer in (no_key, wrong):
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert error_of(answer)["code"] == "invalid_api_key"


def test_only_what_tells_of_the_model_needs_a_key(make_site, talk):
    site, _ = make_site(TENANTS)
    asked = [("GET", path, None, None)
             for path in ("/health", "/metrics", "/v1/models", "/v1/models/tiny")]
    assert [answer.status_code for answer in talk(site, *asked)] == [200, 200, 401, 401]


def test_a_mistake_of_ours_is_told_as_one(site, talk, monkeypatch):
    monkeypatch.setattr(site.service, "submit", lambda job: 1 / 0)
    answer, fine = talk(site, completion(), ("GET", "/v1/models", None, None))
    assert answer.status_code == 500
    assert error_of(answer) == {"message": "the server made a mistake; its log says more",
                                "type": "server_error", "param": None, "code": "internal_error"}
    assert fine.status_code == 200


# --- looking -----------------------------------------------------------------------------------


def test_the_model_is_listed(site, talk):
    every, one = talk(site, *(("GET", path, None, None)
                             for path in ("/v1/models", "/v1/models/tiny")))
    card = {"id": "tiny", "object": "model", "created": 0, "owned_by": "second-send"}
    assert every.json() == {"object": "list", "data": [card]}
    assert one.json() == card


def test_metrics_count_what_was_done(make_site, talk):
    site, _ = make_site(num_replicas=2, limits=Limits(context=403, max_tokens_per_step=50))
    *_, page = talk(site, completion(), completion(), completion(foo=1),
                    ("GET", "/metrics", None, None))
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = page.text.splitlines()
    for line in ('minimodel_answers_total{reason="length"} 2',
                 'minimodel_refused_total{code="unsupported_parameter"} 1',
                 'minimodel_prompt_tokens_total{found="memory"} 64',
                 'minimodel_prompt_tokens_total{found="disk"} 0',
                 'minimodel_prompt_tokens_total{found="nowhere"} 80',
                 "minimodel_output_tokens_total 40",
                 "minimodel_time_to_first_token_seconds_count 2",
                 'minimodel_replica_up{replica="1"} 1',
                 'minimodel_running{replica="0"} 0', 'minimodel_free{replica="0"} 60'):
        assert line in lines
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    assert page.text.endswith("\n")


def test_metrics_tell_memory_from_disk(make_site, talk, tmp_path):
    talk(make_site(store=tmp_path)[0], completion())
    *_, page = talk(make_site(store=tmp_path)[0], completion(PROMPT[:40]), completion(),
                    ("GET", "/metrics", None, None))
    found = dict(re.findall(r'prompt_tokens_total\{found="(\w+)"\} (\d+)', page.text))
    assert found == {"memory": "32", "disk": "64", "nowhere": "17"}


def test_health_says_who_serves(make_site, talk):
    site, _ = make_site(num_replicas=2)
    answer, = talk(site, ("GET", "/health", None, None))
    assert answer.status_code == 200
    assert answer.json() == {"status": "ok", "replicas": {"0": "ok", "1": "ok"}}
    assert site.service.health() == (False, {
        "status": "stopped", "reason": "the server is shutting down: send the request again later"})
