"""The program ``packhouse serve``: starts the parts in order, and stops them in the reverse order in a bounded time."""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packhouse.client.errors import PackhouseError, Unavailable
from packhouse.client.store import store_at
from packhouse.service import logs
from packhouse.service.app import create_app
from packhouse.service.catalog import Catalog
from packhouse.service.guardian import guarded
from packhouse.service.home import locked
from packhouse.service.inventory import Inventory
from packhouse.service.jobs import Jobs
from packhouse.service.metrics import Metrics
from packhouse.service.observed import ObservedWork
from packhouse.service.parts import Parts
from packhouse.service.server import answering, listening
from packhouse.service.settings import Settings
from packhouse.service.space import Space
from packhouse.service.store_format import check_format
from packhouse.service.tokens import Tokens
from packhouse.service.traces import exported
from packhouse.service.verifying import VERIFYING, BackgroundCheck
from packhouse.service.work import CacheWork, warm_up

if TYPE_CHECKING:
    from packhouse.worker.executor import Executor

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Time between two looks at Ray."""
AWAY_SECONDS = 900.0
"""How long a lost Ray cluster is waited for before the service ends, so that whoever starts it hears of it."""


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on; one open to others needs a token.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    home: Annotated[Path | None, typer.Option(help="Folder of the database and the store.")] = None,
) -> None:
    """Run the service in this process until SIGTERM or Ctrl-C: HTTP, the job table and a local Ray.

    Exits with 2 when it cannot start as told.
    """
    try:
        settings = Settings.load(host=host, port=port, home=home)
        logs.set_up(settings.log_format, settings.log_level)
        run(settings)
    except PackhouseError as error:
        typer.echo(f"packhouse serve: {error}", err=True)
        raise typer.Exit(2) from None


def run(settings: Settings) -> None:
    """Start everything, wait for a signal, stop everything. Raises ``PackhouseError`` for what keeps it from starting.

    HTTP comes first, so that health can be asked while Ray starts; Ray starts in this thread, the main one, because
    its processes die with the thread that made them.
    """
    stop = threading.Event()
    with ExitStack() as stack:
        listener = stack.enter_context(listening(settings.host, settings.port))
        stack.enter_context(locked(settings.home))
        stack.enter_context(guarded())
        traces = stack.enter_context(exported(settings.traces))
        store = store_at(settings.store)
        store.check()
        check_format(store)
        catalog = Catalog(settings.database_url)
        stack.callback(catalog.close)
        settings.check_open(Tokens(catalog.engine).usable())
        if settings.tls is None and not settings.on_loopback:
            log.warning("tokens and data travel in the clear: set PACKHOUSE_TLS_CERT, or let a proxy speak TLS")
        stack.enter_context(_signals(stop))
        from packhouse.worker.executor import Executor  # imports ray: after all that can be refused quickly

        executor = Executor(settings.cpus, settings.ray_address, settings.for_workers)
        metrics = Metrics()
        inventory = Inventory(catalog.engine, lease=settings.lease)
        cache_work = CacheWork(
            store, catalog, executor, metrics.encoded, settings.tokenize_modules, inventory=inventory
        )
        work = ObservedWork(cache_work, metrics, traces)
        name = f"{socket.gethostname()}:{settings.home}"  # whoever holds the lock of this home
        jobs = Jobs(
            catalog,
            work,
            at_once=settings.jobs_at_once,
            name=name,
            lease=settings.lease,
            quota=settings.jobs_per_token,
            ready=lambda: executor.usable,
        )
        space = Space(inventory, store, jobs.signs, budget=settings.store_budget, keep=settings.keep)
        host, port = listener.getsockname()[:2]
        scheme = "http" if settings.tls is None else "https"
        address = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        app = create_app(Parts(settings, store, catalog, jobs, executor, space, metrics, traces))
        stack.enter_context(answering(app, listener, jobs, stop, settings.tls))
        warming = threading.Thread(target=warm_up, name="warm-up", daemon=True)
        warming.start()
        stack.callback(executor.shutdown)
        executor.start()
        warming.join()  # it took about as long; from here on a wrong request is refused at once
        stack.enter_context(_signals(stop))  # Ray has set its own
        # Not before Ray is up: by then, workers of a service that was killed have ended too.
        log.info("store %s, %d temporary files of dead processes removed", store.location, store.sweep())
        lock, unlock = partial(jobs.signs.lock, VERIFYING), partial(jobs.signs.unlock, VERIFYING)
        check = BackgroundCheck(store, catalog, settings.verify_mb_per_s, lock=lock, unlock=unlock)
        check.start()
        stack.callback(check.stop)
        stack.enter_context(_working(jobs, space, settings.stop_within))
        typer.echo(f"packhouse serves {address} (Ctrl-C stops it)")
        _look_after(executor, stop)
        log.info("stopping, within %g s", settings.stop_within)
        _end_within(settings.stop_within)


def _look_after(executor: "Executor", stop: threading.Event) -> None:
    """Wait for ``stop``, in the thread that started Ray; give up on a cluster that stays away."""
    seen = time.monotonic()
    while not stop.wait(LOOK_SECONDS):
        if executor.look_after():
            seen = time.monotonic()
        elif time.monotonic() - seen > AWAY_SECONDS:
            raise Unavailable(
                f"Ray was away for {AWAY_SECONDS:g} s", "see to its head and start the service again: jobs are kept"
            )


@contextmanager
def _signals(stop: threading.Event) -> Iterator[None]:
    """Let SIGTERM and SIGINT set ``stop``; a second one changes nothing, because the time to stop is bounded."""
    previous = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end_within(seconds: float) -> None:
    """See to it that this process ends in time even if a part of it does not: the guardian ends what it leaves."""
    timer = threading.Timer(seconds, os._exit, [1])
    timer.daemon = True
    timer.start()


@contextmanager
def _working(jobs: Jobs, space: Space, within: float) -> Iterator[None]:
    jobs.start()
    space.start()
    try:
        yield
    finally:
        space.stop()
        if not jobs.stop(within / 2):
            log.warning("a job did not stop in time: its processes are ended with Ray")
