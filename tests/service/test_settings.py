"""Settings: where they come from, and what is refused."""

from pathlib import Path

import pytest

from packhouse.client.errors import InvalidRequest
from packhouse.service.keep import Keep
from packhouse.service.settings import Settings


def test_defaults_lie_in_the_home(tmp_path: Path) -> None:
    settings = Settings.load({"PACKHOUSE_HOME": str(tmp_path)})
    assert (settings.host, settings.port, settings.cpus) == ("127.0.0.1", 7077, None)
    assert settings.store == str(tmp_path / "store")
    assert settings.database_url == f"sqlite:///{tmp_path}/packhouse.db"


def test_a_store_is_a_folder_or_a_bucket(tmp_path: Path) -> None:
    assert Settings.load({"PACKHOUSE_STORE": "s3://bucket/a/b"}).store == "s3://bucket/a/b"
    assert Settings.load({"PACKHOUSE_STORE": str(tmp_path)}).store == str(tmp_path)


def test_arguments_win_over_the_environment(tmp_path: Path) -> None:
    environment = {"PACKHOUSE_HOME": "/elsewhere", "PACKHOUSE_PORT": "1", "PACKHOUSE_CPUS": "3"}
    settings = Settings.load(environment, home=tmp_path, port=0, host="::1")
    assert (settings.home, settings.host, settings.port, settings.cpus) == (tmp_path, "::1", 0, 3)


def test_a_database_url_may_stand_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text("postgresql://packhouse:secret@database/packhouse\n")
    settings = Settings.load({"PACKHOUSE_DATABASE_URL_FILE": str(file)})
    assert settings.database_url == "postgresql://packhouse:secret@database/packhouse"
    with pytest.raises(InvalidRequest, match="are both set: unset one"):
        Settings.load({"PACKHOUSE_DATABASE_URL_FILE": str(file), "PACKHOUSE_DATABASE_URL": "sqlite:///x"})
    with pytest.raises(InvalidRequest, match=r"cannot be read .*: name a text file"):
        Settings.load({"PACKHOUSE_DATABASE_URL_FILE": str(tmp_path / "none")})


def test_space_is_bounded_in_units_for_people() -> None:
    limits = {"PACKHOUSE_STORE_BUDGET": "1.5TB", "PACKHOUSE_KEEP_HOURS": "0.5", "PACKHOUSE_KEEP_PLAN_DAYS": "2"}
    settings = Settings.load({**limits, "PACKHOUSE_LEASE_SECONDS": "5"})
    assert (settings.store_budget, settings.lease) == (1_500_000_000_000, 5)
    assert settings.keep == Keep(recent=1800, plans=172_800)
    assert (Settings.load({}).store_budget, Settings.load({}).keep) == (None, Keep())


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"PACKHOUSE_SOURCE_ROOTS": "/data,here"}, "source root 'here' is a relative path"),
        ({"PACKHOUSE_TLS_CERT": "/none"}, "PACKHOUSE_TLS_CERT is '/none', which is no file"),
        ({"PACKHOUSE_TLS_KEY": "/none"}, "PACKHOUSE_TLS_CERT is missing"),
        ({"PACKHOUSE_JOBS_PER_TOKEN": "0"}, "PACKHOUSE_JOBS_PER_TOKEN is '0'"),
        ({"PACKHOUSE_AUDIT_DAYS": "never"}, "PACKHOUSE_AUDIT_DAYS is 'never'"),
        ({"PACKHOUSE_PORT": "70000"}, "70000 is not a port"),
        ({"PACKHOUSE_PORT": "http"}, "PACKHOUSE_PORT is 'http'"),
        ({"PACKHOUSE_CPUS": "0"}, "PACKHOUSE_CPUS is '0'"),
        ({"PACKHOUSE_VERIFY_MB_PER_S": "-1"}, "PACKHOUSE_VERIFY_MB_PER_S is '-1'"),
        ({"PACKHOUSE_VERIFY_MB_PER_S": "nan"}, "PACKHOUSE_VERIFY_MB_PER_S is 'nan'"),
        ({"PACKHOUSE_STORE_BUDGET": "lots"}, "PACKHOUSE_STORE_BUDGET: 'lots' is not a size"),
        ({"PACKHOUSE_LEASE_SECONDS": "0"}, "PACKHOUSE_LEASE_SECONDS is '0'"),
        ({"PACKHOUSE_KEEP_HOURS": "inf"}, "PACKHOUSE_KEEP_HOURS is 'inf'"),
        ({"PACKHOUSE_STORE": "gs://bucket"}, "neither a folder nor an S3 address"),
        ({"PACKHOUSE_STORE": "s3://Bucket"}, "has the bucket 'Bucket'"),
        ({"PACKHOUSE_STORE": "s3://bucket?zone=1"}, "has 'zone'"),
    ],
)
def test_bad_settings_are_named(environment: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        Settings.load(environment)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org", "192.168.1.7"])
def test_other_machines_are_let_in_with_tokens_and_roots_only(host: str) -> None:
    settings = Settings.load({"PACKHOUSE_HOST": host})
    with pytest.raises(InvalidRequest, match="packhouse token create NAME --role admin"):
        settings.check_open(tokens=False)
    with pytest.raises(InvalidRequest, match="set PACKHOUSE_SOURCE_ROOTS"):
        settings.check_open(tokens=True)
    with pytest.raises(InvalidRequest, match="set PACKHOUSE_SOURCE_ROOTS"):
        Settings.load({"PACKHOUSE_HOST": host, "PACKHOUSE_SOURCE_ROOTS": ""}).check_open(tokens=True)
    Settings.load({"PACKHOUSE_HOST": host, "PACKHOUSE_SOURCE_ROOTS": "/data"}).check_open(tokens=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_this_machine_needs_neither(host: str) -> None:
    Settings.load({"PACKHOUSE_HOST": host}).check_open(tokens=False)
