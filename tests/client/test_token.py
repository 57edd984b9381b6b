"""The client's token: where it comes from, where it goes, and where it never shows."""

import logging
import pickle
from pathlib import Path

import httpx
import pytest

from packhouse.client.api import Client
from packhouse.client.connection import Connection
from packhouse.client.errors import InvalidRequest, PackhouseError
from packhouse.client.wire_access import parse_lifetime

TOKEN = "ph_0123abcd_" + "s" * 43


def answering(seen: list[httpx.Request], status: int = 200, **headers: str) -> httpx.MockTransport:
    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(status, json=[], headers=headers)

    return httpx.MockTransport(answer)


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PACKHOUSE_TOKEN", "PACKHOUSE_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_a_request_carries_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[httpx.Request] = []
    Client(transport=answering(seen)).jobs()
    monkeypatch.setenv("PACKHOUSE_TOKEN", f" {TOKEN}\n")
    Client(transport=answering(seen)).jobs()
    monkeypatch.delenv("PACKHOUSE_TOKEN")
    (tmp_path / "token").write_text(TOKEN + "\n")
    monkeypatch.setenv("PACKHOUSE_TOKEN_FILE", str(tmp_path / "token"))
    Client(transport=answering(seen)).jobs()
    Client(transport=answering(seen), token="ph_other").jobs()
    assert [one.headers.get("authorization") for one in seen] == [
        None,
        f"Bearer {TOKEN}",
        f"Bearer {TOKEN}",
        "Bearer ph_other",
    ]


def test_a_redirect_is_not_followed_with_it() -> None:
    seen: list[httpx.Request] = []
    client = Client(transport=answering(seen, 307, location="https://evil.example/v1/jobs"), token=TOKEN)
    with pytest.raises(PackhouseError, match="leads elsewhere"):
        client.jobs()
    assert [one.url.host for one in seen] == ["127.0.0.1"]


def test_it_shows_in_no_error_and_no_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.DEBUG)
    client = Client(transport=answering([], 401), token=TOKEN)
    with pytest.raises(PackhouseError) as error:
        client.jobs()
    monkeypatch.setenv("PACKHOUSE_TOKEN", TOKEN + "\u00e9")
    with pytest.raises(InvalidRequest) as odd:
        Client(transport=answering([])).jobs()
    shown = f"{error.value!r} {odd.value!r} {client!r} {client.connection!r} {caplog.text}"
    assert "ssss" not in shown


def test_a_loader_process_has_it_too() -> None:
    connection = pickle.loads(pickle.dumps(Connection("http://127.0.0.1:1", None, 1.0, TOKEN)))
    assert connection._client.headers["authorization"] == f"Bearer {TOKEN}"
    connection.close()


def test_settings_that_contradict_or_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKHOUSE_TOKEN_FILE", str(tmp_path / "none"))
    with pytest.raises(InvalidRequest, match=r"PACKHOUSE_TOKEN_FILE is .*none'"):
        Client(transport=answering([])).jobs()
    monkeypatch.setenv("PACKHOUSE_TOKEN", TOKEN)
    with pytest.raises(InvalidRequest, match="are both set"):
        Client(transport=answering([])).jobs()
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    with pytest.raises(InvalidRequest, match="SSL_CERT_FILE is"):
        Client(token=TOKEN).jobs()


@pytest.mark.parametrize(("text", "days"), [("12h", 0.5), ("90d", 90.0), ("4w", 28.0)])
def test_a_lifetime(text: str, days: float) -> None:
    assert parse_lifetime(text) == days


@pytest.mark.parametrize("text", ["", "0d", "90", "d", "-1d", "1y", "999999d"])
def test_what_is_no_lifetime(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a lifetime"):
        parse_lifetime(text)
