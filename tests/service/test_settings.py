"""Settings: where they come from, and what is refused."""

from pathlib import Path

import pytest

from packhouse.client.errors import InvalidRequest
from packhouse.service.settings import Settings


def test_defaults_lie_in_the_home(tmp_path: Path) -> None:
    settings = Settings.load({"PACKHOUSE_HOME": str(tmp_path)})
    assert (settings.host, settings.port, settings.cpus) == ("127.0.0.1", 7077, None)
    assert settings.store == str(tmp_path / "store")
    assert settings.database_url == f"sqlite:///{tmp_path}/packhouse.db"


def test_arguments_win_over_the_environment(tmp_path: Path) -> None:
    environment = {"PACKHOUSE_HOME": "/elsewhere", "PACKHOUSE_PORT": "1", "PACKHOUSE_CPUS": "3"}
    settings = Settings.load(environment, home=tmp_path, port=0, host="::1")
    assert (settings.home, settings.host, settings.port, settings.cpus) == (tmp_path, "::1", 0, 3)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"PACKHOUSE_HOST": "0.0.0.0"}, "no access tokens yet"),
        ({"PACKHOUSE_HOST": "example.org"}, "no access tokens yet"),
        ({"PACKHOUSE_HOST": "192.168.1.7"}, "no access tokens yet"),
        ({"PACKHOUSE_PORT": "70000"}, "70000 is not a port"),
        ({"PACKHOUSE_PORT": "http"}, "PACKHOUSE_PORT is 'http'"),
        ({"PACKHOUSE_CPUS": "0"}, "PACKHOUSE_CPUS is '0'"),
        ({"PACKHOUSE_STORE": "s3://bucket"}, "is not a folder"),
    ],
)
def test_bad_settings_are_named(environment: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        Settings.load(environment)
