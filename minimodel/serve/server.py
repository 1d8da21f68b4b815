"""The server as a process: engines, a port, and an orderly end.

It ends in this order: no new connections; who is being served has `grace_s` seconds to be done;
who is not is told; the engines' thread ends, with all that it noted on disk.
"""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from threading import Thread

import uvicorn

from ..cache.paged import PagedCache
from ..cache.store import DiskStore
from ..cluster.router import Policy
from ..engine.engine import Engine, fingerprint_of
from ..engine.scheduler import Limits
from ..model.transformer import Transformer
from ..tokenizer import VOCAB_SIZE
from .api import Site, make_app
from .service import Service

LOOPBACK = "127.0.0.1"


def make_service(model: Transformer, *, num_replicas: int = 1, num_blocks: int = 2_048,
                 store: Path | str | None = None, max_waiting: int = 64,
                 limits: Limits | None = None, policy: Policy | None = None) -> Service:
    """A service with replicas of a model: each with a cache of its own, all with one store.

    Raises ValueError for a model of another vocabulary, and for a store that cannot be opened.
    """
    if model.config.vocab_size != VOCAB_SIZE:
        raise ValueError(f"the model has a vocabulary of {model.config.vocab_size}, not the "
                         f"{VOCAB_SIZE} bytes and marks that clients send: serve a model that was "
                         "trained on them")
    disk = DiskStore(store, fingerprint_of(model)) if store is not None else None
    limits, dtype = limits or Limits(context=model.config.context), model.norm.weight.dtype
    engines = [Engine(model, PagedCache(model.config, num_blocks, dtype=dtype), limits,
                      keep_records=1_000, store=disk) for _ in range(num_replicas)]
    return Service(engines, policy, max_waiting)


def bind(host: str = LOOPBACK, port: int = 0) -> socket.socket:
    """A socket that listens; port 0 takes any that is free. Raises ValueError if none is there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1_024)
    except (OSError, OverflowError) as error:
        raise ValueError(f"cannot listen on {host} port {port}: {error}. Give another port, 0 for "
                         "any that is free, or a host name of this machine") from error


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(listening: socket.socket) -> bool:
    """Whether only this machine can reach a socket."""
    return ip_address(listening.getsockname()[0]).is_loopback


class Server(uvicorn.Server):
    """Uvicorn, which lets the service end before it waits for the last connections."""

    def __init__(self, site: Site, grace_s: float = 5.0):
        super().__init__(uvicorn.Config(
            make_app(site), log_level="warning", access_log=False, lifespan="off", ws="none",
            timeout_graceful_shutdown=int(grace_s) + 10))
        self.service, self.grace_s = site.service, grace_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        last_call = asyncio.get_running_loop().call_later(self.grace_s, self.service.stop)
        await super().shutdown(sockets)
        last_call.cancel()
        self.service.stop()
        await asyncio.to_thread(self.service.thread.join)


def serve(site: Site, listening: socket.socket) -> None:
    """Serve until a signal comes (Ctrl-C, SIGTERM)."""
    with listening, site.service:
        Server(site).run(sockets=[listening])


@contextmanager
def serving(site: Site, port: int = 0, grace_s: float = 0.0) -> Iterator[str]:
    """Serve in the background while the block runs: for notebooks and tests. Gives the URL."""
    with bind(LOOPBACK, port) as listening, site.service:
        server = Server(site, grace_s)
        thread = Thread(target=server.run, kwargs={"sockets": [listening]}, name="HTTP")
        url = url_of(listening)
        thread.start()
        try:
            yield url
        finally:
            server.should_exit = True
            thread.join()
