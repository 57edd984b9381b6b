"""The program ``packhouse serve``: starts the parts in order, and stops them in the reverse order in a bounded time."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from packhouse.client.errors import PackhouseError
from packhouse.client.store import LocalStore
from packhouse.service.app import create_app
from packhouse.service.catalog import Catalog
from packhouse.service.guardian import guarded
from packhouse.service.home import locked
from packhouse.service.jobs import Jobs
from packhouse.service.parts import Parts
from packhouse.service.server import answering, listening
from packhouse.service.settings import Settings
from packhouse.service.work import CacheWork, warm_up

log = logging.getLogger(__name__)


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on; loopback only.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    home: Annotated[Path | None, typer.Option(help="Folder of the database and the store.")] = None,
) -> None:
    """Run the service in this process until SIGTERM or Ctrl-C: HTTP, the job table and a local Ray.

    Exits with 2 when it cannot start as told.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        run(Settings.load(host=host, port=port, home=home))
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
        store = LocalStore(settings.store)
        catalog = Catalog(settings.database_url)
        stack.callback(catalog.close)
        stack.enter_context(_signals(stop))
        from packhouse.worker.executor import Executor  # imports ray: after all that can be refused quickly

        executor = Executor(num_cpus=settings.cpus, address=settings.ray_address)
        jobs = Jobs(catalog, CacheWork(store, catalog, executor), at_once=settings.jobs_at_once)
        host, port = listener.getsockname()[:2]
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        app = create_app(Parts(settings, store, catalog, jobs, executor))
        stack.enter_context(answering(app, listener, jobs, stop))
        warming = threading.Thread(target=warm_up, name="warm-up", daemon=True)
        warming.start()
        stack.callback(executor.shutdown)
        executor.start()
        warming.join()  # it took about as long; from here on a wrong request is refused at once
        stack.enter_context(_signals(stop))  # Ray has set its own
        # Not before Ray is up: by then, workers of a service that was killed have ended too.
        log.info("store %s, %d temporary files of dead processes removed", store.root, store.sweep())
        stack.enter_context(_working(jobs, settings.stop_within))
        typer.echo(f"packhouse serves {address} (Ctrl-C stops it)")
        stop.wait()
        log.info("stopping, within %g s", settings.stop_within)
        _end_within(settings.stop_within)


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
def _working(jobs: Jobs, within: float) -> Iterator[None]:
    jobs.start()
    try:
        yield
    finally:
        if not jobs.stop(within / 2):
            log.warning("a job did not stop in time: its processes are ended with Ray")
