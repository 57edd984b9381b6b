"""The parts of compose.yaml on this machine, without containers: ``make stack``.

PostgreSQL, an S3 server, a Ray head that asks for a token, and two services, told by the compose file's own variables
where they can be. Jobs go to both, and the second gets as hits what the first has made.
"""

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
from tests.deploy.tools import load
from tests.postgres import server as postgres
from tests.s3_server import s3_server

from packhouse.client import Client, Job, JobSpec
from packhouse.trainer.demo_data import sample_texts, train_tokenizer, write_corpus

BIN = str(Path(sys.executable).parent)
PATIENCE = 120.0
"""Seconds that a part may take to start."""

Environment = dict[str, str]


def main() -> None:
    """Start the parts, submit jobs, say what came of them; exit with 1 if that is not what should."""
    with tempfile.TemporaryDirectory(prefix="stack", dir="/tmp") as name, ExitStack() as stack:
        folder = Path(name)
        compose = load("compose/compose.yaml")["services"]
        (folder / "database_url").write_text(stack.enter_context(postgres())())
        port = stack.enter_context(s3_server()).port
        environment = _secrets(folder)
        script = compose["bucket"]["command"][0].replace("s3:8333", f"127.0.0.1:{port}")
        subprocess.run([f"{BIN}/python", "-c", script], env=environment, check=True)
        environment["PACKHOUSE_RAY_ADDRESS"] = stack.enter_context(_ray(folder, environment))
        store = compose["service"]["environment"]["PACKHOUSE_STORE"].replace("s3:8333", f"127.0.0.1:{port}")
        environment |= {"PACKHOUSE_STORE": store, "PACKHOUSE_DATABASE_URL_FILE": str(folder / "database_url")}
        urls = [stack.enter_context(_service(folder / f"home{number}", environment)) for number in (1, 2)]
        corpus = write_corpus(folder)
        train_tokenizer(sample_texts(*corpus), folder / "tokenizer")
        first, second = (_run(url, corpus[0], folder / "tokenizer") for url in urls)
        assert first.dataset == second.dataset, "the services made different datasets of one source"
        assert (first.progress.hits, second.progress.hits) == (0, first.progress.blocks)
        for url in urls:
            metrics = httpx.get(f"{url}/metrics").text
            assert 'packhouse_jobs{state="succeeded"} 2.0' in metrics, "a service does not see the other's job"
            assert 'packhouse_part_up{part="ray"} 1.0' in metrics


def _run(url: str, source: Path, tokenizer: Path) -> Job:
    with Client(url) as client:
        job = client.wait(client.submit(JobSpec(sources=[str(source)], tokenizer=str(tokenizer))).id)
    told = job.progress
    print(f"{url}: dataset {job.dataset}, {told.rows} rows, {told.hits} of {told.blocks} blocks were hits")
    return job


def _secrets(folder: Path) -> Environment:
    """Write the secrets that come by file; return the environment that names them, and holds none."""
    (folder / "credentials").write_text("[default]\naws_access_key_id = packhouse\naws_secret_access_key = secret\n")
    (folder / "token").write_text("0123456789abcdef" * 3)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PACKHOUSE_", "RAY_"))}
    return kept | {
        "AWS_SHARED_CREDENTIALS_FILE": str(folder / "credentials"),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


@contextmanager
def _ray(folder: Path, environment: Environment) -> Iterator[str]:
    """Run a head that also works, on loopback; yield its address."""
    gcs, client = _free_ports(2)
    options = ["--num-cpus=2", "--include-dashboard=false", "--object-store-memory=100000000"]
    where = ["--node-ip-address=127.0.0.1", f"--port={gcs}", f"--ray-client-server-port={client}"]
    # Ray's sockets lie below its folder, and their paths must be short.
    start = [f"{BIN}/ray", "start", "--block", "--head", f"--temp-dir={folder}/ray", *where, *options]
    asked = environment | {"RAY_ADDRESS": f"127.0.0.1:{gcs}"}

    def answers() -> bool:
        return subprocess.run([f"{BIN}/ray", "health-check"], env=asked, capture_output=True).returncode == 0

    with _process(start, folder / "ray.log", environment, answers):
        yield f"ray://127.0.0.1:{client}"


@contextmanager
def _service(home: Path, environment: Environment) -> Iterator[str]:
    """Run a service; yield its address."""
    log = home.with_suffix(".log")
    command = [f"{BIN}/packhouse", "serve", "--port", "0", "--home", str(home)]
    with _process(command, log, environment, lambda: "packhouse serves" in log.read_text()):
        found = re.search(r"packhouse serves (\S+)", log.read_text())
        assert found is not None
        assert httpx.get(f"{found[1]}/readyz").status_code == 200
        yield found[1]


@contextmanager
def _process(command: list[str], log: Path, environment: Environment, ready: Callable[[], bool]) -> Iterator[None]:
    """Run a process; raise with its last words if it is not ready in time."""
    with open(log, "w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + PATIENCE
        while not ready():
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{command[0]} did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(60)


def _free_ports(count: int) -> list[int]:
    """Return free ports, above those that Ray gives its workers."""
    free = []
    for port in range(20_001, 30_000):
        with socket.socket() as one:
            free += [port] if one.connect_ex(("127.0.0.1", port)) else []
        if len(free) == count:
            return free
    raise SystemExit("no port from 20,001 to 29,999 is free")


if __name__ == "__main__":
    main()
