"""The HTTP server: a socket that is taken first, and a thread that answers on it."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from packhouse.client.errors import InvalidRequest, Unavailable
from packhouse.service.jobs import Jobs

STREAMS_WITHIN = 3
"""Seconds that open requests have to end after the service was told to; then they are cut."""

IDLE_SECONDS = 75
"""Seconds that a connection may wait for its next request. Clients let go of idle ones earlier, httpx after five: where
both do so at the same time, the next request of a trainer runs into a closed connection."""


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Listen on ``port``, or on a free one for 0; raise ``Unavailable``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named as TCP, for asyncio sends at once on such sockets only; on others each answer waits 40 ms for the client.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(1024)
        except OSError as error:
            fact = f"port {port} of {host} cannot be used ({error.strerror})"
            raise Unavailable(fact, "stop what listens there, or choose another with --port") from error
        yield listener


@contextmanager
def answering(
    app: FastAPI, listener: socket.socket, jobs: Jobs, stop: threading.Event, tls: tuple[Path, Path] | None = None
) -> Iterator[None]:
    """Answer HTTP in a thread of its own, and set ``stop`` when it ends by itself; HTTPS with ``tls``.

    ``tls`` is a certificate, with its chain, and its key, both in PEM. Raises ``InvalidRequest`` where they are not.

    At the end of the context, streams of events are ended and other requests get a moment.
    """

    def answer() -> None:
        try:
            server.run([listener])
        finally:
            stop.set()  # a service that cannot be asked is of no use

    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=STREAMS_WITHIN,
        timeout_keep_alive=IDLE_SECONDS,
        server_header=False,
        ssl_certfile=None if tls is None else tls[0],
        ssl_keyfile=None if tls is None else tls[1],
    )
    if tls is not None:
        _load(config)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=answer, name="http", daemon=True)
    thread.start()
    try:
        yield
    finally:
        jobs.hang_up()
        server.should_exit = True
        thread.join(STREAMS_WITHIN + 2)


def _load(config: uvicorn.Config) -> None:
    """Read certificate and key now, not in the thread that answers."""
    try:
        config.load()
    except (OSError, ValueError) as error:
        fact = f"TLS cannot be set up from {config.ssl_certfile} and {config.ssl_keyfile} ({error})"
        remedy = "set PACKHOUSE_TLS_CERT to a PEM file with the certificate and its chain, PACKHOUSE_TLS_KEY to its key"
        raise InvalidRequest(fact, remedy) from None
