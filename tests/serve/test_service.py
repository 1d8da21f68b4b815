"""The service without HTTP: replicas, aborts in every state, a full queue, failures, an end."""

import asyncio

import pytest

from minimodel.cluster.router import round_robin
from minimodel.engine.request import Sampling, State
from minimodel.engine.scheduler import Limits
from minimodel.serve.errors import ApiError
from minimodel.serve.job import Job
from minimodel.serve.tenants import Tenant
from minimodel.tokenizer import decode, encode

pytestmark = pytest.mark.timeout(180)
PROMPT = encode("The code of the red door is 4821.\nQ: What is the code of the red door?\n")
SHORT = encode("Hello")


def job_for(prompt=PROMPT, max_tokens=20, **how):
    return Job(prompt, Sampling(max_tokens), **how)


async def rest_of(job):
    """The text of a job's first answer from now on, and its usage."""
    text, usage = "", None
    while usage is None:
        news = await job.inbox.get()
        text += "".join(piece.text for piece in news.pieces if piece.index == 0)
        usage = news.usage
    return text, usage


async def look(service, function):
    return await service.bridge.result_of(function)


async def until_state(service, job, state):
    while await look(service, lambda: job.request and job.request.state) is not state:
        await asyncio.sleep(0.001)


async def assert_nothing_is_left(service):
    await look(service, service.check)
    for replica in service.replicas.values():
        stats = await look(service, replica.engine.stats)
        assert (stats["held"], stats["free"]) == (0, stats["blocks"])
        assert replica.jobs == [] and replica.engine.requests == {}
    assert service.jobs == set()


# --- serving -----------------------------------------------------------------------------------


def test_jobs_on_several_replicas_write_what_one_engine_writes(make_site, slow):
    site, _ = make_site(num_replicas=3, policy=round_robin)
    prompts = [PROMPT[:size] for size in (72, 31, 17, 5, 72, 50, 33)]

    async def serve(service):
        jobs = [service.submit(job_for(prompt)) for prompt in prompts]
        texts = [(await rest_of(job))[0] for job in jobs]
        for job in jobs:
            service.close(job)
        await assert_nothing_is_left(service)
        return texts, {job.replica for job in jobs}
    with site.service:
        texts, replicas = asyncio.run(serve(site.service))
    assert texts == [decode(slow(prompt)) for prompt in prompts]
    assert replicas == {"0", "1", "2"}


def test_the_router_sends_a_prompt_where_it_is_remembered(make_site):
    site, _ = make_site(num_replicas=3)

    async def serve(service):
        found = []
        for prompt in (PROMPT, SHORT, PROMPT, [*PROMPT, 7], SHORT):
            job = service.submit(job_for(prompt, 3))
            found.append((job, (await rest_of(job))[1].hit_tokens))
            service.close(job)
        return [(job.replica, hits) for job, hits in found]
    with site.service:
        served = asyncio.run(serve(site.service))
    assert served[0][0] == served[2][0] == served[3][0]
    assert [hits for _, hits in served] == [0, 0, 64, 64, 0]


def test_replicas_share_one_store(make_site, tmp_path):
    site, _ = make_site(num_replicas=2, policy=round_robin, store=tmp_path)

    async def serve(service):
        jobs = []
        for _ in range(2):
            jobs.append(service.submit(job_for()))
            usage = (await rest_of(jobs[-1]))[1]
        return [job.replica for job in jobs], usage
    with site.service:
        replicas, usage = asyncio.run(serve(site.service))
    assert sorted(replicas) == ["0", "1"]
    assert (usage.hit_tokens, usage.disk_hit_tokens) == (64, 64)


def test_a_token_is_told_before_its_step_s_blocks_are_written(make_site, tmp_path):
    site, _ = make_site(store=tmp_path)
    store, order = site.service.replicas["0"].engine.store, []

    def noted(word, function):
        def call(*arguments):
            order.append(word)
            return function(*arguments)
        return call

    async def serve(service):
        store.save_chain = noted("saved", store.save_chain)
        job = job_for(PROMPT[:63])
        job.inbox.put = noted("told", job.inbox.put)
        await rest_of(service.submit(job))
        last = job_for(encode("y" * 40), 1)
        await rest_of(service.submit(last))
        await look(service, lambda: order.append(len(store.index)))
    with site.service:
        asyncio.run(serve(site.service))
    # Blocks are full after the prompt's 48 tokens of 63, the next's 64, and the next's 80.
    assert order == ["told", "saved", "told", "saved", *["told"] * 16, "saved", "told", "told",
                     "saved", 7]        # at once, even where no step follows


def test_salt_and_retention_are_the_tenant_s(make_site):
    site, _ = make_site()

    async def serve(service):
        usages = []
        for name in ("ann", "ben", "ann"):
            job = service.submit(job_for(tenant=Tenant(name, "agent")))
            usages.append((await rest_of(job))[1].hit_tokens)
        return usages, job.request.retention
    with site.service:
        assert asyncio.run(serve(site.service)) == ([0, 0, 64], "agent")


# --- leaving -----------------------------------------------------------------------------------


def abort_in(make_site, slow, state, *, steps=0, before=(), **how):
    """Abort a job in a state, among others, who do not notice."""
    site, brake = make_site(**how)

    async def serve(service):
        for prompt in before:
            job = service.submit(job_for(prompt, 1))
            await rest_of(job)
            service.close(job)
        brake.left = 0
        if before:
            await look(service, service.replicas["0"].engine.pool.forget)   # found on disk only
        other = service.submit(job_for(SHORT, 30))
        job = service.submit(job_for())
        brake.left = steps
        await until_state(service, job, state)
        service.close(job)
        service.close(job)                              # twice is once
        assert await look(service, lambda: job.request.state) is State.FINISHED
        await look(service, service.check)
        brake.left = float("inf")
        text = (await rest_of(other))[0]
        service.close(other)
        await assert_nothing_is_left(service)
        return text, service.counts.answers["aborted"]
    with site.service:
        text, num_aborted = asyncio.run(serve(site.service))
    assert text == decode(slow(SHORT, 30))
    return num_aborted


def test_g18_abort_while_it_waits(make_site, slow):
    assert abort_in(make_site, slow, State.WAITING) == 1


def test_g18_abort_while_it_waits_for_a_place(make_site, slow):
    limits = Limits(context=403, max_running=1)
    assert abort_in(make_site, slow, State.WAITING, steps=3, limits=limits) == 1


def test_g18_abort_in_the_middle_of_its_prompt(make_site, slow):
    limits = Limits(context=403, max_tokens_per_step=16)
    assert abort_in(make_site, slow, State.RUNNING, steps=2, limits=limits) == 1


def test_g18_abort_while_it_writes(make_site, slow):
    assert abort_in(make_site, slow, State.RUNNING, steps=6) == 1


def test_g18_abort_while_its_blocks_are_read_from_disk(make_site, slow, tmp_path):
    limits = Limits(context=403, max_loads_per_step=1)
    assert abort_in(make_site, slow, State.LOADING, steps=2, before=[PROMPT], limits=limits,
                    store=tmp_path) == 1


def test_g18_abort_when_it_is_finished(make_site, slow):
    assert abort_in(make_site, slow, State.FINISHED, steps=25) == 0


def test_g18_abort_of_several_answers(make_site):
    site, brake = make_site()

    async def serve(service):
        brake.left = 5
        job = service.submit(job_for(num_answers=3))
        await job.inbox.get()
        service.close(job)
        await assert_nothing_is_left(service)
    with site.service:
        asyncio.run(serve(site.service))


def test_a_stop_string_gives_the_blocks_back(make_site, slow):
    """While the other answer goes on."""
    site, _ = make_site()

    async def serve(service):
        stop = bytes(token for token in slow(PROMPT) if token < 256)[4:6]
        job = service.submit(job_for(stops=[stop], num_answers=2))
        usage = (await rest_of(job))[1]
        service.close(job)
        await assert_nothing_is_left(service)
        return usage.output_tokens, [answer.reason for answer in job.answers]
    with site.service:
        written, reasons = asyncio.run(serve(site.service))
    assert reasons == ["stop", "stop"]
    assert written < 2 * 20


# --- limits ------------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_empties(make_site):
    site, brake = make_site(max_waiting=3)

    async def serve(service):
        brake.left = 0
        jobs = [service.submit(job_for(SHORT, 2)) for _ in range(3)]
        with pytest.raises(ApiError, match="3 requests wait for their first token, and the limit "
                                           "is 3: send this one again in a moment") as refused:
            service.submit(job_for(SHORT, 2))
        assert (refused.value.status, refused.value.code) == (429, "queue_full")
        service.close(jobs.pop())                       # who leaves makes room
        jobs.append(service.submit(job_for(SHORT, 2)))
        brake.left = float("inf")
        texts = {(await rest_of(job))[0] for job in jobs}
        jobs.append(service.submit(job_for(SHORT, 2)))  # who has begun waits no more
        texts.add((await rest_of(jobs[-1]))[0])
        for job in jobs:
            service.close(job)
        await assert_nothing_is_left(service)
        return texts
    with site.service:
        assert len(asyncio.run(serve(site.service))) == 1


def test_what_the_engine_rejects_is_told_and_counts_nowhere(make_site):
    site, _ = make_site(num_blocks=4)

    async def serve(service):
        job = service.submit(job_for())
        with pytest.raises(ApiError, match="all 4 blocks together hold 64; shorten it") as refused:
            await job.inbox.get()
        service.close(job)
        await assert_nothing_is_left(service)
        return refused.value.status
    with site.service:
        assert asyncio.run(serve(site.service)) == 400


@pytest.mark.parametrize(("how", "message"), [
    ({"num_replicas": 0}, "0 replicas and max_waiting=64 serve nobody"),
    ({"max_waiting": 0}, "1 replicas and max_waiting=0 serve nobody")])
def test_a_service_for_nobody(make_site, how, message):
    with pytest.raises(ValueError, match=message):
        make_site(**how)


# --- failures and the end ----------------------------------------------------------------------


def break_engine(service, name):
    def advance():
        raise RuntimeError("out of luck")
    service.replicas[name].engine.advance = advance


async def failure_of(job):
    with pytest.raises(ApiError) as failed:
        await rest_of(job)
    return failed.value.status, failed.value.code


def test_an_engine_that_fails_is_lost_and_the_other_goes_on(make_site, slow):
    site, brake = make_site(num_replicas=2, policy=round_robin)

    async def serve(service):
        brake.left = 4
        jobs = [service.submit(job_for(prompt)) for prompt in (PROMPT, SHORT, SHORT, PROMPT)]
        while not all(job.has_begun for job in jobs):
            await asyncio.sleep(0.001)
        lost = jobs[0].replica
        break_engine(service, lost)
        brake.left = float("inf")
        told = [await failure_of(job) for job in jobs if job.replica == lost]
        texts = [(await rest_of(job))[0] for job in jobs if job.replica != lost]
        later = service.submit(job_for(SHORT))
        texts.append((await rest_of(later))[0])
        for job in [*jobs, later]:
            service.close(job)
        await assert_nothing_is_left(service)
        return told, texts, later.replica != lost, service.health()
    with site.service:
        told, texts, is_elsewhere, health = asyncio.run(serve(site.service))
    assert told == [(500, "engine_failed")] * 2
    assert sorted(texts) == sorted([decode(slow(SHORT)), decode(slow(PROMPT)), decode(slow(SHORT))])
    assert is_elsewhere
    assert health[0] is True
    assert health[1]["status"] == "degraded"
    assert sorted(health[1]["replicas"].values()) == ["failed: RuntimeError", "ok"]


@pytest.mark.parametrize("how", ["raises", "has nothing to do", "cannot save"])
def test_when_the_last_engine_fails_nobody_hangs(make_site, how):
    site, _ = make_site()
    engine = site.service.replicas["0"].engine
    if how == "raises":
        break_engine(site.service, "0")
    elif how == "has nothing to do":
        engine.advance = lambda: None
    else:
        engine.save = lambda: 1 / 0

    async def serve(service):
        jobs = [service.submit(job_for()) for _ in range(3)]
        told = [await failure_of(job) for job in jobs]
        told.append(await failure_of(service.submit(job_for())))
        return told, service.health()
    with site.service:
        told, (serves, state) = asyncio.run(serve(site.service))
    assert set(told[:3]) <= {(500, "engine_failed"), (503, "unavailable")}
    assert told[0] == (500, "engine_failed")
    assert told[3] == (503, "unavailable")
    assert not serves
    assert state["status"] == "failed"


def test_one_request_that_cannot_be_submitted_stops_nobody_else(make_site):
    site, _ = make_site()

    async def serve(service):
        bad, good = service.submit(job_for([10**12])), service.submit(job_for(SHORT, 2))
        return await failure_of(bad), (await rest_of(good))[1].output_tokens
    with site.service:
        assert asyncio.run(serve(site.service)) == ((500, "engine_failed"), 2)


def test_a_thread_that_fails_tells_everybody(make_site):
    site, brake = make_site()

    async def serve(service):
        brake.left = 0
        jobs = [service.submit(job_for()) for _ in range(2)]
        service._step = None                            # a mistake of the service's own
        told = [await failure_of(job) for job in jobs]
        service.thread.join()
        with pytest.raises(ApiError, match="stopped serving"):
            service.submit(job_for())
        for job in jobs:
            service.close(job)
        return told, service.health()[0]
    with site.service:
        assert asyncio.run(serve(site.service)) == ([(500, "engine_failed")] * 2, False)


def test_an_end_in_the_middle_tells_everybody(make_site):
    site, brake = make_site()

    async def serve(service):
        brake.left = 2
        jobs = [service.submit(job_for(prompt)) for prompt in (PROMPT, SHORT)]
        await jobs[0].inbox.get()
        service.stop()
        service.stop()
        told = [await failure_of(job) for job in jobs]
        for job in jobs:
            service.close(job)
        return told
    with site.service as service:
        assert asyncio.run(serve(service)) == [(503, "unavailable")] * 2
    assert not service.thread.is_alive()
    service.check()
    assert service.replicas["0"].engine.stats()["held"] == 0


def test_a_service_that_was_not_started_serves_nobody(make_site):
    assert make_site()[0].service.health() == (False, {
        "status": "stopped", "reason": "not started"})
