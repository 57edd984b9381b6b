"""Access: tokens and their roles, routes and their least roles, browsers, the audit log, quotas."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text

from packhouse.client.errors import InvalidRequest, NotFound
from packhouse.client.store import LocalStore
from packhouse.service import access, tokens
from packhouse.service.app import create_app
from packhouse.service.audit import ACTIONS, Audit
from packhouse.service.catalog import Catalog
from packhouse.service.inventory import Inventory
from packhouse.service.jobs import Jobs
from packhouse.service.parts import Parts
from packhouse.service.settings import Settings
from packhouse.service.space import Space
from packhouse.service.tokens import Role, Tokens
from packhouse.service.work import CacheWork
from packhouse.worker.executor import Executor

FORM = {"content-type": "application/x-www-form-urlencoded"}


class House:
    """The application over a database of its own; no job runs."""

    def __init__(self, catalog: Catalog, home: Path, **changes: Any) -> None:
        settings = Settings(home=home, store=str(home / "store"), database_url="", **changes)
        store, executor, inventory = LocalStore(home / "store"), Executor(num_cpus=1), Inventory(catalog.engine)
        jobs = Jobs(catalog, CacheWork(store, catalog, executor, inventory=inventory), quota=settings.jobs_per_token)
        self.parts = Parts(settings, store, catalog, jobs, executor, Space(inventory, store, jobs.signs))
        self.app = create_app(self.parts)
        self.web = TestClient(self.app, base_url="http://localhost", follow_redirects=False)

    def token(self, name: str, role: Role, lifetime: float | None = None) -> dict[str, str]:
        return {"authorization": "Bearer " + self.parts.tokens.create(name, role, lifetime)[1]}

    def ask(self, method: str, path: str, **request: Any) -> int:
        return self.web.request(method, path, **request).status_code


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with closing(Catalog(f"sqlite:///{tmp_path}/packhouse.db")) as catalog:
        yield House(catalog, tmp_path)


@pytest.fixture
def known(database_url: str) -> Iterator[Tokens]:
    with closing(Catalog(database_url)) as catalog:
        yield Tokens(catalog.engine)


def routes(app: Any) -> set[tuple[str, str]]:
    """Return every route that the application answers, by its OpenAPI document and by its router."""
    found = set()
    todo = list(app.routes)
    while todo:
        route = todo.pop()
        todo += getattr(route, "routes", None) or getattr(getattr(route, "original_router", None), "routes", [])
        if getattr(route, "path", None) and getattr(route, "methods", None):
            found |= {(method, route.path) for method in route.methods}
    return found


def test_every_route_has_a_least_role_and_no_other_has(house: House) -> None:
    found = {(method, path) for method, path in routes(house.app) if method != "HEAD"}
    told = house.app.openapi()["paths"]
    # What the document tells of must be among what was found: else the walk over the routes misses some.
    assert {(method.upper(), path) for path in told for method in told[path]} <= found
    assert found == set(access.LEAST)


def test_every_route_that_changes_something_is_audited() -> None:
    unsafe = {route for route in access.LEAST if route[0] != "GET"}
    looks = {("POST", "/login"), ("POST", "/logout"), ("POST", "/preview"), ("POST", "/v1/preview")}
    assert unsafe - looks - {("POST", "/v1/cache/explain"), ("POST", "/v1/cache/uses")} == set(ACTIONS)


def _path(route: str) -> str:
    return re.sub(r"\{.*?\}", "0" * 32, route)


def test_each_route_lets_in_its_least_role_and_nobody_below(house: House) -> None:
    """Whatever else is wrong with the requests, only those who may not are told 401 or 403."""
    by_role = {role: house.token(role.word, role) for role in Role}
    for (method, route), least in access.LEAST.items():
        if route.endswith("/events") or "/live/" in route:
            continue
        path = _path(route)
        if least is None:
            assert house.ask(method, path) != 401 or (method, route) == ("POST", "/login"), route
            continue
        assert house.ask(method, path) == 401, route
        for role, headers in by_role.items():
            refused = house.ask(method, path, headers=headers) in (401, 403)
            assert refused == (role < least), (method, route, role)


def test_an_unknown_path_is_no_way_around(house: House) -> None:
    headers = house.token("ann", Role.SUBMIT)
    for path in ("/v1/jobs/", "/v1//jobs", "/v1/secret", "/v1/tokens/", "/V1/jobs", "/v1/jobs%2f"):
        assert house.ask("GET", path) == 401, path
        assert house.ask("GET", path, headers=headers) in (403, 404), path


def test_without_a_token_this_machine_is_let_in_and_nobody_else(house: House) -> None:
    assert house.ask("GET", "/v1/jobs") == 200
    assert house.ask("GET", "/v1/jobs", headers={"host": "evil.example:7077"}) == 403  # a name that leads to loopback
    secret = house.token("ann", Role.READ)
    assert house.ask("GET", "/v1/jobs") == 401
    assert house.ask("GET", "/v1/jobs", headers=secret) == 200
    house.parts.tokens.revoke("ann")
    assert house.ask("GET", "/v1/jobs", headers=secret) == 401
    assert house.ask("GET", "/v1/jobs") == 401  # closed for good


def test_off_loopback_there_is_no_open_service(tmp_path: Path) -> None:
    with closing(Catalog(f"sqlite:///{tmp_path}/packhouse.db")) as catalog:
        house = House(catalog, tmp_path, host="0.0.0.0")
        assert house.ask("GET", "/v1/jobs") == 401
        assert (house.ask("GET", "/livez"), house.ask("GET", "/metrics")) == (200, 401)


@pytest.mark.parametrize("job", ["..%2f..", "%2e%2e%2f%2e%2e", "..%5c..", "a" * 5000, "%00"])
def test_an_id_is_no_path(house: House, job: str) -> None:
    """Case B089."""
    headers = house.token("ann", Role.READ)
    for place in ("jobs", "datasets", "plans", "shards"):
        answer = house.web.get(f"/v1/{place}/{job}", headers=headers)
        assert answer.status_code in (403, 404), answer.text
        assert str(house.parts.settings.home) not in answer.text


@pytest.mark.parametrize("body", [b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000])
def test_a_body_is_nested_so_deeply_at_most(house: House, body: bytes) -> None:
    answer = house.web.post("/v1/jobs", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, "recursion limit exceeded" in answer.json()["detail"]) == (422, True)


def test_a_refusal_says_what_to_do_and_shows_no_token(house: House) -> None:
    headers = house.token("ann", Role.READ)
    nobody = house.web.get("/v1/jobs")
    assert nobody.headers["www-authenticate"].startswith("Bearer")
    assert "packhouse token create" in nobody.json()["remedy"]
    forbidden = house.web.post("/v1/cache/gc", json={}, headers=headers)
    assert forbidden.json()["detail"] == "the token 'ann' may read, and this needs admin"
    wrong = house.web.get("/v1/jobs", headers={"authorization": "Bearer ph_secret"})
    assert "secret" not in wrong.text


def test_a_token_is_kept_as_a_digest_and_told_once(known: Tokens) -> None:
    token, secret = known.create("ann", Role.SUBMIT)
    assert re.fullmatch(r"ph_[0-9a-f]{8}_[\w-]{43}", secret)
    assert secret[3:11] == token.id
    found = known.caller(secret)
    assert found is not None
    assert (found.name, found.role) == ("ann", Role.SUBMIT)
    with known._engine.connect() as connection:
        stored = " ".join(map(str, connection.execute(text("SELECT * FROM tokens")).one()))
    assert secret[12:] not in stored
    assert hashlib.sha256(secret[12:].encode()).hexdigest() in stored
    assert secret not in str(known.all())


def test_what_is_no_token_is_not_let_in(known: Tokens) -> None:
    _, secret = known.create("ann", Role.ADMIN)
    other = known.create("bob", Role.READ)[1]
    last = "A" if secret[-1] != "A" else "B"
    wrong = [secret[:-1] + last, secret[:-1], secret + "A", secret[:12] + other[12:], other[:12] + secret[12:], ""]
    assert [known.caller(one) for one in [*wrong, secret.upper(), "ph_00000000_" + secret[12:]]] == [None] * 8


def test_tokens_end_and_their_names_are_free_again(known: Tokens) -> None:
    ended = known.create("short", Role.READ, lifetime=0.0)[1]
    lives = known.create("long", Role.READ, lifetime=3600.0)[1]
    assert (known.caller(ended), known.caller(lives) is None) == (None, False)
    with pytest.raises(InvalidRequest, match="there is a token 'long'"):
        known.create("long", Role.READ)
    known.revoke("long")
    assert known.caller(lives) is None
    again = known.create("long", Role.READ)[1]
    assert known.caller(again) is not None
    with pytest.raises(NotFound, match="no token 'nobody'"):
        known.revoke("nobody")
    with pytest.raises(InvalidRequest, match="cannot name a token"):
        known.create("a b\n", Role.READ)


def test_a_token_revoked_elsewhere_ends_within_a_second(known: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    _, secret = known.create("ann", Role.READ)
    assert known.caller(secret) is not None
    Tokens(known._engine).revoke("ann")
    monkeypatch.setattr(tokens, "FRESH", 0.0)  # as if that second had passed
    assert known.caller(secret) is None


def test_a_browser_signs_in_and_its_cookie_is_no_use_elsewhere(house: House) -> None:
    secret = house.token("ann", Role.SUBMIT)["authorization"].removeprefix("Bearer ")
    shown = house.web.get("/jobs", headers={"accept": "text/html"})
    assert (shown.status_code, shown.headers["location"]) == (303, "/login?next=/jobs")
    assert house.ask("POST", "/login", content="token=ph_wrong", headers=FORM) == 401
    cross = {**FORM, "sec-fetch-site": "cross-site"}
    assert house.ask("POST", "/login", content=f"token={secret}", headers=cross) == 403
    entered = house.web.post("/login", content=f"token={secret}&next=/jobs", headers=FORM)
    assert (entered.status_code, entered.headers["location"]) == (303, "/jobs")
    assert {"HttpOnly", "SameSite=strict"} <= {part.strip() for part in entered.headers["set-cookie"].split(";")}

    assert house.ask("GET", "/jobs", headers={"accept": "text/html"}) == 200
    own = {**FORM, "origin": "http://localhost", "sec-fetch-site": "same-origin"}
    assert house.ask("POST", "/preview", content="source=/a", headers=own) == 422
    for foreign in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}, {}, {"origin": "null"}):
        assert house.ask("POST", "/preview", content="source=/a", headers={**FORM, **foreign}) == 403, foreign
        assert house.ask("DELETE", "/v1/jobs/abc", headers=foreign) == 403, foreign
    house.ask("POST", "/logout", headers=own)
    assert house.ask("GET", "/jobs") == 401


def test_a_browser_is_told_in_pages(house: House) -> None:
    page = {"accept": "text/html,*/*", **FORM}
    own = {**page, "origin": "http://localhost"}
    refused = house.web.post("/preview", content="source=/a", headers={**own, **house.token("ann", Role.READ)})
    assert (refused.status_code, refused.headers["content-type"].split(";")[0]) == (403, "text/html")
    assert "may read, and this needs submit" in refused.text
    ended = house.web.post("/preview", content="source=/a", headers=own)
    assert (ended.status_code, ended.headers["location"]) == (303, "/login")


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_cookie_that_came_by_tls_stays_there_also_behind_a_proxy(house: House, scheme: str) -> None:
    secret = house.token("ann", Role.READ)["authorization"].removeprefix("Bearer ")
    entered = house.web.post("/login", data={"token": secret}, headers={"origin": f"{scheme}://localhost"})
    assert ("Secure" in entered.headers["set-cookie"].split("; ")) == (scheme == "https")


@pytest.mark.parametrize("others", ["a=b; {}; alone", "[odd]=1; {}", '_xsrf=2|1:0|"x; {}', "{}; =; ;", "{}"])
def test_the_cookies_of_other_programs_are_no_hindrance(house: House, others: str) -> None:
    secret = house.token("ann", Role.READ)["authorization"].removeprefix("Bearer ")
    assert house.ask("GET", "/v1/whoami", headers={"cookie": others.format(f"packhouse_token={secret}")}) == 200


def test_a_form_of_too_many_fields_is_refused_where_one_signs_in(house: House) -> None:
    answer = house.web.post("/login", content="&".join(f"f{n}=1" for n in range(101)), headers=FORM)
    assert (answer.status_code, "more than 100 fields" in answer.text) == (422, True)


@pytest.mark.parametrize("onward", ["//evil.example/x", "https://evil.example", "/\\evil.example", "javascript:x"])
def test_signing_in_leads_nowhere_else(house: House, onward: str) -> None:
    secret = house.token("ann", Role.READ)["authorization"].removeprefix("Bearer ")
    entered = house.web.post("/login", data={"token": secret, "next": onward})
    assert entered.headers["location"] == "/"


def test_another_sites_page_cannot_use_an_open_service(house: House) -> None:
    assert house.ask("POST", "/v1/cache/rescan") == 200
    for foreign in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
        assert house.ask("POST", "/v1/cache/rescan", headers=foreign) == 403


def test_tokens_over_rest_and_who_did_what(house: House) -> None:
    admin = house.token("root", Role.ADMIN)
    made = house.web.post("/v1/tokens", json={"name": "ann", "role": "submit", "expires_days": 1.5}, headers=admin)
    assert made.status_code == 201
    ann = {"authorization": "Bearer " + made.json()["secret"]}
    assert house.web.get("/v1/whoami", headers=ann).json() == {"name": "ann", "role": "submit"}
    assert house.ask("POST", "/v1/tokens", json={"name": "ann", "role": "read"}, headers=admin) == 422
    assert house.ask("DELETE", "/v1/tokens/ann", headers=ann) == 403
    assert house.ask("DELETE", "/v1/tokens/ann", headers={**admin, "x-request-id": "r1"}) == 200
    assert house.ask("GET", "/v1/whoami", headers=ann) == 401
    assert [one["name"] for one in house.web.get("/v1/tokens", headers=admin).json()] == ["root", "ann"]
    entries = house.web.get("/v1/audit", headers=admin).json()
    assert [(one["actor"], one["action"], one["subject"]) for one in entries] == [
        ("root", "token-revoke", "ann"),
        ("root", "token-create", "ann"),
    ]
    assert entries[0]["request"] == "r1"
    page = house.web.get("/v1/audit?limit=1", headers=admin)
    older = re.findall("<(.*)>", page.headers["link"])[0]
    assert house.web.get(older, headers=admin).json()[0]["action"] == "token-create"


def test_old_entries_of_the_audit_log_go(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packhouse.service.audit.TIDY_EVERY", 8)
    with closing(Catalog(database_url)) as catalog:
        audit = Audit(catalog.engine, keep_days=2)
        for number in range(7):
            audit.note("ann", "pin", str(number))
        with catalog.engine.begin() as connection:
            connection.execute(text('UPDATE audit SET "at" = "at" - 3 * 86400'))
        assert audit.entries(before=None, limit=10) == []
        audit.note("ann", "unpin", "x")
        with catalog.engine.connect() as connection:
            assert connection.scalar(text("SELECT count(*) FROM audit")) == 1


def _submit(house: House, path: Path, tokenizer: Path, headers: dict[str, str], **more: Any) -> Any:
    path.write_text('{"text": "a"}\n')
    return house.web.post(
        "/v1/jobs", json={"sources": [str(path)], "tokenizer": str(tokenizer), **more}, headers=headers
    )


def test_a_token_has_so_many_jobs_and_its_own(tmp_path: Path, tokenizer_dir: Path) -> None:
    with closing(Catalog(f"sqlite:///{tmp_path}/packhouse.db")) as catalog:
        house = House(catalog, tmp_path, jobs_per_token=2)
        ann, bob, root = (
            house.token(*one) for one in (("ann", Role.SUBMIT), ("bob", Role.SUBMIT), ("root", Role.ADMIN))
        )
        first, second, third = (_submit(house, tmp_path / f"{n}.jsonl", tokenizer_dir, ann) for n in range(3))
        assert [one.status_code for one in (first, second, third)] == [202, 202, 429]
        assert (third.headers["retry-after"], "2 jobs" in third.json()["detail"]) == ("30", True)
        assert _submit(house, tmp_path / "0.jsonl", tokenizer_dir, ann).status_code == 200  # it is the first one
        assert _submit(house, tmp_path / "3.jsonl", tokenizer_dir, bob).status_code == 202
        assert first.json()["submitter"] == "ann"

        place = f"/v1/jobs/{first.json()['id']}"
        assert (house.ask("DELETE", place, headers=bob), house.ask("DELETE", place, headers=ann)) == (403, 200)
        assert house.ask("DELETE", f"/v1/jobs/{second.json()['id']}", headers=root) == 200
        assert _submit(house, tmp_path / "4.jsonl", tokenizer_dir, ann, priority=1).status_code == 403
        assert _submit(house, tmp_path / "4.jsonl", tokenizer_dir, ann, priority=-1).status_code == 202
        assert _submit(house, tmp_path / "5.jsonl", tokenizer_dir, root, priority=3).status_code == 202
        assert (
            house.ask("POST", "/v1/jobs", json={"sources": ["/a"], "tokenizer": "/b", "priority": 4}, headers=root)
            == 422
        )
        actions = [(one.actor, one.action) for one in house.parts.audit.entries(before=None, limit=20)]
        assert actions[::-1][:4] == [("ann", "submit"), ("ann", "submit"), ("ann", "submit"), ("bob", "submit")]
        assert actions[::-1][4:6] == [("ann", "cancel"), ("root", "cancel")]


def test_without_its_database_nobody_is_let_in(house: House) -> None:
    headers = house.token("ann", Role.ADMIN)
    house.parts.tokens._read_at = -10.0
    with house.parts.catalog.engine.begin() as connection:
        connection.execute(text("DROP TABLE tokens"))
    answer = house.web.get("/v1/jobs", headers=headers)
    assert (answer.status_code, answer.json()["title"]) == (503, "Unavailable")
    assert house.ask("GET", "/livez") == 200
