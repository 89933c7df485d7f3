"""Who may do what: a matrix made from the table of routes, and the keys' files and flags."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.serve.app import ROUTES
from octavo.serve.errors import ApiError
from octavo.serve.http.auth import Access, Keys
from octavo.serve.routes.route import Route
from patience import patient
from server_rig import SRC, RunningServer, StartServer

USER, OTHER, ADMIN = "user-key-0123456789", "other-key-0123456789", "admin-key-0123456789"
PATHS = {"/v1/models/{id}": "/v1/models/octavo-tiny"}
PROTECTED = [route for route in ROUTES if route.access is not Access.PUBLIC]

# what a client may send instead of a key
STRANGERS: dict[str, list[tuple[str, str]]] = {
    "no key": [],
    "empty key": [("Authorization", "Bearer ")],
    "no scheme": [("Authorization", USER)],
    "wrong key": [("Authorization", "Bearer wrong-key-0123456789")],
    "wrong key, lower-case scheme": [("Authorization", "bearer wrong-key-0123456789")],
    "prefix of the key": [("Authorization", f"Bearer {USER[:-1]}")],
    "key and more": [("Authorization", f"Bearer {USER}x")],
    "key in upper case": [("Authorization", f"Bearer {USER.upper()}")],
    "basic": [("Authorization", f"Basic {USER}")],
    "two headers": [("Authorization", f"Bearer {USER}"), ("Authorization", f"Bearer {USER}")],
    "two keys": [("x-api-key", USER), ("x-api-key", USER)],
    "wrong x-api-key": [("x-api-key", "wrong-key-0123456789")],
    "no ascii": [("Authorization", "Bearer \xff\xfe-key-0123456789")],
    "method override": [("X-HTTP-Method-Override", "GET"), ("X-Original-URL", "/health")],
    "forwarded": [("X-Forwarded-For", "127.0.0.1"), ("X-Forwarded-Host", "localhost")],
}


@pytest.fixture(scope="module")
def guarded_server() -> Iterator[RunningServer]:
    """A server with two user keys and an admin key."""
    environment = {"OCTAVO_API_KEY": f"{OTHER},{USER}", "OCTAVO_ADMIN_KEY": ADMIN}
    with RunningServer("--log-level", "debug", mock=True, env=environment) as running:
        yield running.wait_ready()


def call(
    server: RunningServer, method: str, path: str, headers: list[tuple[str, str]]
) -> tuple[int, dict[str, str], bytes]:
    """One request with headers that may be there twice."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=patient(30))
    try:
        connection.putrequest(method, path)
        for name, value in [*headers, ("Content-Type", "application/json"), ("Content-Length", "2")]:
            connection.putheader(name, value.encode("latin-1"))
        connection.endheaders(b"{}")
        response = connection.getresponse()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
    finally:
        connection.close()


def _name(route: Route) -> str:
    return f"{route.method} {route.path}"


@pytest.mark.parametrize("route", PROTECTED, ids=_name)
def test_strangers_get_401_and_always_the_same(guarded_server: RunningServer, route: Route) -> None:
    path = PATHS.get(route.path, route.path)
    bodies = set()
    for kind, headers in STRANGERS.items():
        status, given, body = call(guarded_server, route.method, path, headers)
        assert status == 401, kind
        assert given["www-authenticate"] == "Bearer"
        bodies.add(body)
    assert len(bodies) == 1 and json.loads(bodies.pop())["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("route", ROUTES, ids=_name)
def test_other_spellings_of_a_path_open_nothing(guarded_server: RunningServer, route: Route) -> None:
    path = PATHS.get(route.path, route.path)
    for spelling in (
        f"/{path}",
        f"{path}//",
        f"/x/..{path}",
        f"/%2e{path}",
        path + "%00",
        path.upper() + "/",
        "/." + path,
    ):
        assert call(guarded_server, route.method, spelling, [])[0] == 401, spelling
        key = [("Authorization", f"Bearer {USER}")]
        assert call(guarded_server, route.method, spelling, key)[0] == 404, spelling
    for method in {"GET", "POST", "PUT", "DELETE", "OPTIONS"} - {route.method}:
        wanted = 401 if not any(r.path == route.path and r.method == method for r in ROUTES) else None
        assert wanted is None or call(guarded_server, method, path, [])[0] == wanted


@pytest.mark.parametrize("route", ROUTES, ids=_name)
def test_keys_open_what_they_should(guarded_server: RunningServer, route: Route) -> None:
    path = PATHS.get(route.path, route.path)
    for key, is_admin in ((USER, False), (OTHER, False), (ADMIN, True)):
        for headers in (
            [("Authorization", f"Bearer {key}")],
            [("x-api-key", key)],
            [("authorization", f"bearer {key}")],
        ):
            status = call(guarded_server, route.method, path, headers)[0]
            if route.access is Access.ADMIN and not is_admin:
                assert status == 403
            else:
                assert status not in (401, 403)


def test_what_is_public_tells_nothing(guarded_server: RunningServer) -> None:
    public = [route for route in ROUTES if route.access is Access.PUBLIC]
    assert {route.path for route in public} == {"/health", "/ping", "/ready", "/"}
    for route in public:
        body = guarded_server.request(route.method, route.path).body
        assert b"octavo-tiny" not in body and USER.encode() not in body


def test_keys_are_not_logged(guarded_server: RunningServer) -> None:
    guarded_server.get("/v1/models", headers={"Authorization": f"Bearer {USER}"})
    log = guarded_server.stderr()
    assert USER not in log and ADMIN not in log and "wrong-key" not in log


def test_admin_routes_without_any_key_are_for_this_machine_only() -> None:
    keys = Keys()
    keys.check([], Access.ADMIN)
    with pytest.raises(ApiError) as refusal:
        keys.check([(b"origin", b"http://localhost")], Access.ADMIN)
    assert refusal.value.status == 403


@pytest.mark.parametrize("user, admin, wanted", [([USER], [], 403), ([], [ADMIN], 401)])
def test_admin_routes_need_an_admin_key_once_there_are_keys(user: list[str], admin: list[str], wanted: int) -> None:
    with pytest.raises(ApiError) as refusal:
        Keys(user, admin).check([(b"authorization", f"Bearer {USER}".encode())], Access.ADMIN)
    assert refusal.value.status == wanted


def refuse_start(*argv: str, env: dict[str, str] | None = None) -> str:
    """Run `octavo serve`, which must end with exit code 2; its only line."""
    result = subprocess.run(
        [sys.executable, "-m", "octavo", "serve", *argv],
        capture_output=True,
        text=True,
        timeout=patient(30),
        env={"PYTHONPATH": str(SRC), "PATH": os.environ["PATH"], **(env or {})},
    )
    assert result.returncode == 2, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("octavo: error: "), result.stderr
    return lines[0]


def test_a_key_file_must_be_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    for content, mode, wanted in (
        (USER, 0o644, "others can read"),
        ("", 0o600, "holds no key"),
        ("# nothing\n", 0o600, "holds no key"),
        ("short", 0o600, "needs 16"),
    ):
        path.write_text(content)
        path.chmod(mode)
        line = refuse_start("--api-key-file", str(path), "--host", "0.0." + "0.0")
        assert wanted in line and "short" not in line
    assert "cannot be read" in refuse_start("--api-key-file", str(tmp_path / "missing"))


def test_short_keys_and_open_addresses_are_refused() -> None:
    anywhere = "0.0." + "0.0"
    line = refuse_start("--host", anywhere, env={"OCTAVO_API_KEY": "secret-short"})
    assert "needs 16" in line and "--host" in line and "secret-short" not in line
    assert "--insecure-no-auth" in refuse_start("--host", anywhere)


def test_a_short_key_will_do_on_this_machine_with_a_warning(start_server: StartServer) -> None:
    server = start_server(env={"OCTAVO_API_KEY": "token-1"})
    assert server.get("/v1/models").status == 401
    assert server.get("/v1/models", headers={"Authorization": "Bearer token-1"}).status == 200
    assert "--api-key: a key has fewer than 16 characters" in server.stderr() and "token-1" not in server.stderr()


def test_a_key_in_the_command_line_is_warned_of(tmp_path: Path) -> None:
    with RunningServer("--api-key", USER, mock=True) as server:
        assert "--api-key can be read by others" in server.stderr() and USER not in server.stderr()
        path = tmp_path / "keys"
    path.write_text(f"# two\n{OTHER}\n{USER}\n")
    path.chmod(0o600)
    with RunningServer("--api-key-file", str(path), mock=True) as server:
        server.wait_ready()
        assert server.get("/v1/models").status == 401
        assert server.get("/v1/models", headers={"Authorization": f"Bearer {USER}"}).status == 200
