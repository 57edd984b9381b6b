"""The OpenAPI document is what the service does: requests made from it, right and wrong, and answers held to it."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks as held

from packhouse.client.api import Client
from packhouse.client.format import read_manifest
from packhouse.client.wire import JobSpec
from packhouse.client.wire_plans import PlanSpec
from packhouse.service.tokens import Role

CHECKS = [
    not_a_server_error,
    held.status_code_conformance,
    held.content_type_conformance,
    held.response_schema_conformance,
    held.response_headers_conformance,
    held.negative_data_rejection,
]
schemathesis.openapi.media_type("application/zip", st.binary())
EXAMPLES = settings(
    max_examples=12, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def asked(
    start_service: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
    texts: Path,
    tokenizer_dir: Path,
) -> Iterator[tuple[str, requests.Session, dict[str, str], dict[str, Any]]]:
    """A service of its own with a job, a dataset and a plan: its address, a session, their ids and its document."""
    with start_service(tmp_path_factory.mktemp("openapi")) as service, requests.Session() as session:
        with Client(service.url) as client:
            job = client.wait(client.submit(JobSpec(sources=[str(texts)], tokenizer=str(tokenizer_dir))).id)
            assert job.dataset is not None
            plan = client.plan(PlanSpec(datasets=[job.dataset], pack_length=512))
        shard = read_manifest(service.parts.store, job.dataset).shards[0].key
        ids = {"job_id": job.id, "dataset_id": job.dataset, "plan_id": plan.id, "key": shard, "entry_id": plan.id}
        # With a token from the start: requests here make some, and from the first one on each needs one.
        _, secret = service.parts.tokens.create("tester", Role.ADMIN, None)
        session.trust_env = False
        session.headers["authorization"] = f"Bearer {secret}"
        yield service.url, session, ids, session.get(f"{service.url}/openapi.json").json()


def test_answers_are_those_that_the_document_tells(asked: Any) -> None:
    url, session, ids, document = asked
    schema = schemathesis.openapi.from_dict(document)
    operations: list[Any] = [found.ok() for found in schema.get_all_operations()]  # type: ignore[union-attr]
    assert len(operations) > 35
    seen: set[tuple[str, int]] = set()
    for operation, mode in itertools.product(operations, (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)):
        if mode is GenerationMode.NEGATIVE and not (operation.query or json_body(operation)):
            continue  # any text is a path

        @settings(EXAMPLES, phases=[Phase.generate])
        @given(case=operation.as_strategy(mode), real=st.booleans())
        def ask(case: Any, real: bool) -> None:
            if real:
                case.path_parameters.update({name: ids[name] for name in case.path_parameters if name in ids})
            response = case.call(base_url=url, session=session, timeout=30)
            seen.add((case.operation.label, response.status_code))
            case.validate_response(response, checks=CHECKS)

        ask()
    # Not only refusals: what is there was found.
    assert {("GET /v1/plans/{plan_id}", 200), ("GET /v1/plans/{plan_id}", 404), ("POST /v1/jobs", 422)} <= seen


def json_body(operation: Any) -> bool:
    return any(body.media_type == "application/json" for body in operation.body)


def test_each_refusal_of_the_document_is_a_problem_document(asked: Any) -> None:
    document = asked[-1]
    answers = [
        (status, answer)
        for path in document["paths"].values()
        for operation in path.values()
        for status, answer in operation["responses"].items()
    ]
    assert {status for status, _ in answers if status >= "4"} >= {"401", "403", "404", "409", "410", "413", "422"}
    assert all(list(answer["content"]) == ["application/problem+json"] for status, answer in answers if status >= "4")
    assert set(document["components"]["schemas"]["Problem"]["properties"]) >= {"detail", "remedy", "status"}
    assert "HTTPValidationError" not in document["components"]["schemas"]
