"""The service off loopback: a token, roots and TLS, in a real process, with workers of its own."""

import json
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.program import serving

from packhouse.client.api import Client
from packhouse.client.errors import PackhouseError, Unavailable
from packhouse.client.wire import JobSpec

PACKHOUSE = [sys.executable, "-c", "import sys; from packhouse.client.cli import main; sys.exit(main())"]


def packhouse(*words: str) -> str:
    return subprocess.run([*PACKHOUSE, *words], check=True, capture_output=True, text=True).stdout.strip()


def certificate(folder: Path) -> tuple[str, str]:
    """Make a certificate for loopback that signs itself."""
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    names = "subjectAltName=IP:127.0.0.1,DNS:localhost"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    made += ["-days", "2", "-subj", "/CN=localhost", "-addext", names, "-keyout", key, "-out", cert]
    subprocess.run(made, check=True, capture_output=True)
    return cert, key


def test_the_service_is_open_to_who_has_a_token(
    tmp_path: Path, tokenizer_dir: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate(tmp_path)
    token = packhouse("token", "create", "ann", "--role", "submit", "--home", str(tmp_path))
    settings = {
        "PACKHOUSE_HOST": "0.0.0.0",
        "PACKHOUSE_SOURCE_ROOTS": f"{texts.parent},{tokenizer_dir}",
        "PACKHOUSE_TLS_CERT": cert,
        "PACKHOUSE_TLS_KEY": key,
    }
    (tmp_path / "token").write_text(token + "\n")
    monkeypatch.setenv("SSL_CERT_FILE", cert)
    monkeypatch.setenv("PACKHOUSE_TOKEN_FILE", str(tmp_path / "token"))
    spec = JobSpec(sources=[str(texts)], tokenizer=str(tokenizer_dir))
    with serving(tmp_path, **settings) as program:
        assert program.url.startswith("https://0.0.0.0:")
        url = program.url.replace("0.0.0.0", "127.0.0.1")
        with Client(url) as client:
            job = client.wait(client.submit(spec).id)
            assert job.dataset is not None
            assert client.dataset(job.dataset).rows > 0
            with pytest.raises(PackhouseError, match="lies outside of what this service may read"):
                client.submit(spec.model_copy(update={"sources": ["/etc/passwd"]}))
        with Client(url, token="ph_00000000_" + "A" * 43) as wrong, pytest.raises(PackhouseError) as error:
            wrong.jobs()
        assert (error.value.kind, error.value.status) == ("unauthorized", 401)
        with Client(url.replace("https", "http")) as plain, pytest.raises(Unavailable):
            plain.jobs()
        with httpx.Client(verify=ssl.create_default_context(cafile=cert)) as http:
            assert http.get(url + "/readyz").status_code == 200
            assert http.get(url + "/v1/jobs").status_code == 401
    assert token[12:] not in (tmp_path / "log").read_text()
    done = json.loads(packhouse("token", "audit", "--home", str(tmp_path), "--json"))
    assert [(one["actor"], one["action"], one["subject"]) for one in done] == [
        ("ann", "submit", job.id),
        ("the command line", "token-create", "ann"),
    ]
