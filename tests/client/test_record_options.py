"""Options of records: what the command line makes of a source before the service is told."""

import os

from packhouse.client.record_options import absolute


def test_paths_are_told_from_the_root_and_objects_by_their_address() -> None:
    assert absolute("a/../b.jsonl") == os.path.join(os.getcwd(), "b.jsonl")
    assert absolute("/data/*.jsonl") == "/data/*.jsonl"
    assert absolute("s3://bucket/a/*.jsonl") == "s3://bucket/a/*.jsonl"
    assert absolute("https://host/a.jsonl") == "https://host/a.jsonl", "for the service to refuse"
