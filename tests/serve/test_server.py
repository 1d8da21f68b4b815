"""A real server on a port of this machine, called with the ordinary client."""

import http.client
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from decimal import Decimal
from urllib.parse import urlsplit

import openai
import pytest

from minimodel.cluster.router import round_robin
from minimodel.lesson.town import RED_DOOR, TOWN
from minimodel.model import checkpoint
from minimodel.pricing import Prices, Usage, bill
from minimodel.serve.server import bind, is_loopback, make_service, serving, url_of
from minimodel.serve.tenants import Tenant, Tenants
from minimodel.tokenizer import decode, encode

pytestmark = pytest.mark.timeout(240)
PROMPT = "The code of the red door is 4821.\nQ: What is the code of the red door?\n"
PROMPTS = [PROMPT[:size] for size in (71, 40, 17, 16, 15, 66, 3, 71)]


def write(client, prompt=PROMPT, max_tokens=20, **more):
    return client.completions.create(model="tiny", prompt=prompt, max_tokens=max_tokens, **more)


def text_of(stream):
    return "".join(piece.choices[0].text for piece in stream if piece.choices)


def gauge(here, name):
    """A line of the metrics, as a number."""
    connection = http.client.HTTPConnection(urlsplit(here.url).netloc, timeout=60)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return next((float(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0.0)


def assert_all_blocks_are_free(here):
    for name in here.service.replicas:
        assert gauge(here, f'minimodel_held{{replica="{name}"}}') == 0
        assert gauge(here, f'minimodel_free{{replica="{name}"}}') == 60
    assert here.service.jobs == set()


# --- the same tokens ---------------------------------------------------------------------------


def test_the_client_is_given_what_an_engine_writes(served, slow_text):
    with served() as here:
        whole = write(here.client)
        stream = text_of(write(here.client, stream=True))
    assert whole.choices[0].text == stream == slow_text(PROMPT)
    assert (whole.choices[0].finish_reason, whole.model) == ("length", "tiny")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (72, 20)
    assert whole.usage.prompt_cache_miss_tokens == 72


def test_a_conversation(served, slow):
    said = [{"role": "system", "content": "You are Bo."}, {"role": "user", "content": "Who?"}]
    ask = {"model": "tiny", "messages": said, "max_completion_tokens": 9}
    ids = [257, 259, *b"You are Bo.", 263, 260, *b"Who?", 263, 261]
    with served() as here:
        create = here.client.chat.completions.create
        whole = create(**ask)
        *pieces, last = create(**ask, stream=True, stream_options={"include_usage": True})
        again = create(**ask | {"messages": [*said, whole.choices[0].message,
                                             {"role": "user", "content": "Who?"}]})
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == decode(slow(ids, 9))
    assert "".join(piece.choices[0].delta.content for piece in pieces) == decode(slow(ids, 9))
    assert pieces[0].choices[0].delta.role == "assistant"
    assert all(piece.choices[0].delta.role is None for piece in pieces[1:])
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens == len(ids)
    assert last.usage.prompt_cache_hit_tokens == 16
    assert last.usage.prompt_tokens_details.cached_tokens == 16
    assert again.usage.prompt_cache_hit_tokens >= 16


def test_eight_clients_at_once_on_two_replicas(served, slow_text):
    with served(num_replicas=2, policy=round_robin) as here, ThreadPoolExecutor(8) as pool:
        def ask(number):
            if number % 2:
                return text_of(write(here.client, PROMPTS[number], stream=True)), None
            answer = here.client.completions.with_raw_response.create(
                model="tiny", prompt=PROMPTS[number], max_tokens=20)
            return answer.parse().choices[0].text, answer.headers["x-replica"]
        answers = list(pool.map(ask, range(8)))
        assert_all_blocks_are_free(here)
        served_by = [gauge(here, f'minimodel_cached{{replica="{name}"}}') for name in "01"]
    assert [text for text, _ in answers] == [slow_text(prompt) for prompt in PROMPTS]
    assert {replica for _, replica in answers} <= {"0", "1", None}
    assert all(served_by)


def test_the_list_of_models(served):
    with served() as here:
        assert [model.id for model in here.client.models.list()] == ["tiny"]
        assert here.client.models.retrieve("tiny").owned_by == "second-send"


# --- the bill ----------------------------------------------------------------------------------


def test_the_town_s_second_send_is_billed_as_hits_and_so_is_a_third_after_a_restart(
        make_site, client_of, tmp_path):
    toy, usages = checkpoint.load(), []

    def send(client):
        answer = client.completions.create(model="tiny", prompt=TOWN.ask(RED_DOOR), max_tokens=5)
        usages.append(answer.usage.model_dump())
        return answer.choices[0].text
    texts = set()
    for times in (2, 1):
        site, _ = make_site(model=toy, num_blocks=200, store=tmp_path)
        with serving(site) as url:
            texts |= {send(client_of(url)) for _ in range(times)}
    assert len(texts) == 1
    counts = [(usage["prompt_cache_hit_tokens"], usage["prompt_cache_miss_tokens"],
               usage["prompt_cache_disk_hit_tokens"], usage["completion_tokens"])
              for usage in usages]
    assert counts == [(0, 1_025, 0, 5), (1_024, 1, 0, 5), (1_024, 1, 1_024, 5)]
    prices = Prices("0.003", "0.15", "0.60")
    first, second, third = (bill(Usage.from_api(usage), prices).total for usage in usages)
    assert first == (1_025 * Decimal("0.15") + 5 * Decimal("0.60")) / 1_000_000
    assert second == third == (1_024 * Decimal("0.003") + Decimal("0.15")
                               + 5 * Decimal("0.60")) / 1_000_000


# --- clients that leave ------------------------------------------------------------------------


@contextmanager
def asking(here, **more):
    """A client that has sent a request, as its bare socket."""
    body = json.dumps({"model": "tiny", "prompt": PROMPT, "max_tokens": 300} | more).encode()
    address = urlsplit(here.url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: here\r\n"
                       b"Content-Type: application/json\r\n"
                       b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        yield client


@pytest.mark.parametrize("how", [{}, {"stream": True}], ids=["whole", "stream"])
@pytest.mark.parametrize("steps", [0, 1, 7])
def test_a_client_that_leaves_frees_its_blocks(served, until, slow_text, how, steps):
    with served() as here:
        here.brake.left = steps
        with asking(here, **how) as client:
            until(lambda: here.service.jobs and here.brake.left == 0, "the steps are made")
            if how and steps:
                assert client.recv(100).startswith(b"HTTP/1.1 200")
        aborted = 'minimodel_answers_total{reason="aborted"}'
        until(lambda: gauge(here, aborted) == 1, "it is aborted")
        assert_all_blocks_are_free(here)
        here.brake.left = float("inf")
        assert write(here.client).choices[0].text == slow_text(PROMPT)


def test_a_client_that_leaves_in_the_middle_of_its_body(served):
    with served() as here:
        address = urlsplit(here.url)
        with socket.create_connection((address.hostname, address.port)) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: here\r\n"
                           b"Content-Length: 100\r\n\r\n{")
        assert write(here.client, max_tokens=1).usage.completion_tokens == 1
        assert_all_blocks_are_free(here)


def test_a_stream_that_is_closed_early(served, until):
    with served() as here:
        with write(here.client, max_tokens=300, stream=True) as stream:
            here.brake.left = 0
            next(iter(stream))
        until(lambda: not here.service.jobs, "the job is closed")
        assert_all_blocks_are_free(here)


# --- limits ------------------------------------------------------------------------------------


def test_a_burst_beyond_the_queue_is_refused_in_part_and_served_in_part(served, until, slow_text):
    with served(max_waiting=3) as here, ThreadPoolExecutor(12) as pool:
        here.brake.left = 0
        waiting = [pool.submit(write, here.client) for _ in range(3)]
        until(lambda: len(here.service.jobs) == 3, "three wait")
        for asked in [pool.submit(write, here.client) for _ in range(9)]:
            with pytest.raises(openai.RateLimitError,
                               match=r"3 requests wait .* limit is 3") as over:
                asked.result()
            assert over.value.response.headers["retry-after"] == "1"
        here.brake.left = float("inf")
        assert {asked.result().choices[0].text for asked in waiting} == {slow_text(PROMPT)}
        assert write(here.client).choices[0].text == slow_text(PROMPT)
        assert gauge(here, 'minimodel_refused_total{code="queue_full"}') == 9
        assert_all_blocks_are_free(here)


def test_who_has_patience_is_served_in_the_end(served, slow_text):
    """The ordinary client sends again what was refused."""
    with served(max_waiting=2) as here, ThreadPoolExecutor(8) as pool:
        client = here.client.with_options(max_retries=30)
        texts = set(pool.map(lambda _: write(client, max_tokens=3).choices[0].text, range(8)))
    assert texts == {slow_text(PROMPT, 3)}


def test_a_body_of_any_size_is_answered(served):
    """Even while the client is still sending it."""
    with served() as here:
        for size in (6_000, 70_000, 300_000):
            with pytest.raises(openai.APIStatusError, match="over the limit of 5000") as refused:
                write(here.client, "x" * size)
            assert refused.value.status_code == 413
        assert write(here.client, max_tokens=1).usage.completion_tokens == 1


def test_errors_are_the_client_s_own(served):
    with served(tenants=Tenants({"sk-1": Tenant("ann")})) as here:
        with pytest.raises(openai.AuthenticationError, match="this API key is unknown"):
            write(here.client)
        client = here.client.with_options(api_key="sk-1")
        with pytest.raises(openai.NotFoundError, match="this server has 'tiny'") as refused:
            client.completions.create(model="gpt", prompt="x")
        assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError, match="beyond the context of 403") as refused:
            write(client, "x" * 400, stream=True)
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="frequency_penalty is not supported"):
            write(client, frequency_penalty=0.5)
        assert write(client, user="me", frequency_penalty=0).usage.completion_tokens == 20


# --- failures and the end ----------------------------------------------------------------------


def test_an_engine_that_fails_leaves_no_client_hanging(served, until):
    with served() as here, ThreadPoolExecutor(2) as pool:
        here.brake.left = 3
        whole = pool.submit(write, here.client)
        stream = pool.submit(lambda: text_of(write(here.client, stream=True)))
        until(lambda: len(here.service.jobs) == 2 and here.brake.left == 0, "both are served")
        here.service.replicas["0"].engine.advance = lambda: 1 / 0
        here.brake.left = float("inf")
        with pytest.raises(openai.InternalServerError, match=r"the engine failed .*ZeroDiv"):
            whole.result()
        with pytest.raises(openai.APIError, match="the engine failed"):
            stream.result()
        with pytest.raises(openai.InternalServerError, match="no replica is left") as refused:
            write(here.client)
        assert refused.value.status_code == 503
        assert gauge(here, 'minimodel_replica_up{replica="0"}') == 0
        connection = http.client.HTTPConnection(urlsplit(here.url).netloc, timeout=60)
        connection.request("GET", "/health")
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())) == (503, {
            "status": "failed", "replicas": {"0": "failed: ZeroDivisionError"}})
        connection.close()


def test_an_end_in_the_middle_tells_who_is_still_served(served, until):
    with ThreadPoolExecutor(2) as pool:
        with served() as here:
            here.brake.left = 3
            stream = pool.submit(lambda: list(write(here.client, stream=True)))
            until(lambda: here.brake.left == 0, "the stream has begun")
            whole = pool.submit(write, here.client)
            until(lambda: len(here.service.jobs) == 2, "both are served")
        with pytest.raises(openai.InternalServerError, match="the server is shutting down"):
            whole.result()
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            stream.result()
    assert not here.service.thread.is_alive()
    here.service.check()
    assert here.service.replicas["0"].engine.stats()["held"] == 0
    with pytest.raises(openai.APIConnectionError):
        write(here.client)


def test_with_some_grace_who_is_served_is_served_to_the_end(served, until, slow_text):
    with ThreadPoolExecutor(1) as pool:
        with served(grace_s=200.0) as here:
            here.brake.left = 3
            stream = pool.submit(lambda: text_of(write(here.client, stream=True)))
            until(lambda: here.brake.left == 0, "the stream has begun")
            here.brake.left = float("inf")
        assert stream.result() == slow_text(PROMPT)


# --- ports -------------------------------------------------------------------------------------


def test_a_port_in_use_is_named():
    with bind() as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1 port {port}: .*in use.* "
                                             "Give another port, 0 for any that is free"):
            bind(port=port)


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70_000), ("no.such.host.invalid", 0)])
def test_an_address_that_there_is_not(host, port):
    with pytest.raises(ValueError, match=f"cannot listen on {host} port {port}"):
        bind(host, port)


def test_only_loopback_unless_asked():
    with bind() as here, bind("0.0.0.0") as everywhere:
        assert is_loopback(here)
        assert not is_loopback(everywhere)
        assert url_of(here) == f"http://127.0.0.1:{here.getsockname()[1]}"


def test_a_model_of_another_vocabulary_is_not_served(make_model):
    with pytest.raises(ValueError, match="a vocabulary of 271, not the 264 bytes and marks"):
        make_service(make_model())


def test_ids_of_a_text_are_its_bytes_after_the_start():
    """What the tests above take for granted."""
    assert encode("é") == [257, 0xC3, 0xA9]
