"""Ray as the pipeline sees it."""

import psutil

from packhouse.client.digest import digest_json
from packhouse.worker.executor import Executor


def test_a_local_ray_listens_on_loopback_only(executor: Executor) -> None:
    assert executor.healthy()
    assert executor.result(executor.submit(digest_json, [1])) == digest_json([1])
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    listening = [
        (process.name(), connection.laddr.ip)
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert any("raylet" in name for name, _ in listening)
    assert {address.removeprefix("::ffff:") for _, address in listening} == {"127.0.0.1"}
