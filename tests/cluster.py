"""A Ray cluster of three nodes on this machine, one of which is killed in mid-job, and then the head.

Each time the dataset must be the one of an undisturbed job, and the service must go on by itself. Takes a minute or
two: ``make cluster`` runs it, and the tests do not.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from ray.util import get_node_ip_address
from tests.program import serving

from packhouse.client.api import Client
from packhouse.client.wire import Job, JobSpec, JobState
from packhouse.trainer.demo_data import sample_texts, train_tokenizer, write_corpus

NODES = """
import json, sys
from ray.cluster_utils import Cluster

port, client, ip = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
small = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 << 20, "node_ip_address": ip}
head = {**small, "gcs_server_port": port, "ray_client_server_port": client}
cluster = Cluster(initialize_head=True, head_node_args=head)
nodes = [cluster.add_node(**small) for _ in range(2)]
groups = [cluster.head_node, *nodes]
pids = [[one.process.pid for kind in node.all_processes.values() for one in kind] for node in groups]
print(json.dumps(pids), flush=True)
sys.stdin.read()
"""


@contextmanager
def cluster(ports: list[int], ip: str) -> Iterator[list[list[int]]]:
    """Run three nodes of one CPU each; yield the process ids of each, those of the head first."""
    command = [sys.executable, "-c", NODES, *map(str, ports), ip]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        nodes: list[list[int]] = json.loads(process.stdout.readline())
        try:
            yield nodes
        finally:
            process.kill()
            for node in nodes:
                kill(node)


def kill(node: list[int]) -> None:
    """End all processes of a node at once; its workers end with them."""
    for pid in node:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def say(text: str) -> None:
    """Print what has happened, and when."""
    print(f"{time.monotonic() - BEGUN:6.1f} s  {text}", flush=True)


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(0.1)


def in_the_middle(client: Client, job: Job) -> bool:
    """Return whether a job encodes, and has still much to do."""
    progress = client.job(job.id).progress
    return progress.phase == "encoding" and 0 < progress.bytes_done < progress.bytes / 2


def ready(url: str) -> bool:
    """Return whether a service says that it is ready."""
    return httpx.get(url + "/readyz", timeout=30).status_code == 200


def corpus(file: Path, lines: int) -> Path:
    """Write texts that take some seconds to encode."""
    words = [f"word{number * 7919 % 100_003}" for number in range(120)]
    with open(file, "w") as out:
        for number in range(lines):
            at = number % 60
            out.write(json.dumps({"text": f"{file.name} {number} " + " ".join(words[at : at + 60])}) + "\n")
    return file


def free_ports(ip: str) -> list[int]:
    """Return ports of the head: of its tables, and of the server for clients."""
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind((ip, 0))
        return [each.getsockname()[1] for each in (one, other)]


def main(folder: Path, tokenizer: Path, by_client: bool) -> None:
    """Run it all; the service is a driver of the cluster, or a client of one."""
    # Where Ray looks for a head, whatever name of this machine it is given.
    ip = str(get_node_ip_address())  # type: ignore[no-untyped-call]
    ports = free_ports(ip)
    address = f"ray://{ip}:{ports[1]}" if by_client else f"{ip}:{ports[0]}"
    specs = [
        JobSpec(sources=[str(corpus(folder / f"{name}.jsonl", 100_000))], tokenizer=str(tokenizer))
        for name in ("node", "head")
    ]
    with serving(folder / "alone", PACKHOUSE_CPUS="2") as alone, Client(alone.url) as client:
        wanted = [client.wait(client.submit(spec).id).dataset for spec in specs]
    say(f"undisturbed: {wanted}")
    with cluster(ports, ip) as nodes, serving(folder / "home", PACKHOUSE_RAY_ADDRESS=address) as service:
        client = Client(service.url)
        say("three nodes, and a service")
        job = client.submit(specs[0])
        until(lambda: in_the_middle(client, job), 60, "the first job encodes")
        kill(nodes[1])
        say("one node killed in mid-job")
        done = client.wait(job.id)
        assert done.dataset == wanted[0], done
        say(f"same dataset, {done.progress.seconds:.0f} s")
        job = client.submit(specs[1])
        until(lambda: in_the_middle(client, job), 60, "the second job encodes")
        for node in nodes:
            kill(node)
        say("the head killed in mid-job, and the other nodes with it")
        until(lambda: not ready(service.url), 30, "/readyz tells it")
        say(f"/readyz: {httpx.get(service.url + '/readyz', timeout=30).json()['detail']}")
        until(lambda: client.job(job.id).state is JobState.QUEUED, 30, "the job waits")
        say("the job waits in the queue")
        with cluster(ports, ip):
            say("a new head at the same address")
            until(lambda: ready(service.url), 60, "/readyz")
            say("the service has joined it")
            done = client.wait(job.id)
            assert done.dataset == wanted[1], done
            say("same dataset")
            assert service.process.poll() is None
            client.close()
            service.process.terminate()
            service.process.wait(30)


if __name__ == "__main__":
    BEGUN = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="packhouse-cluster-") as folder:
        train_tokenizer(sample_texts(*write_corpus(Path(folder))), Path(folder) / "tokenizer")
        main(Path(folder), Path(folder) / "tokenizer", "--client" in sys.argv)
