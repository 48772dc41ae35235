"""The console of a real controller: who is let in, what the API answers, what the page and its events carry."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psutil
import pytest
import requests

from trimtab.controller.presence import Presence, find


class Console:
    """Plain HTTP to one console, with the token or without."""

    def __init__(self, presence: Presence) -> None:
        self.presence = presence
        self.host = presence.url.removeprefix("http://")
        self.cookie = f"trimtab_session_{self.host.partition(':')[2]}"
        self.bearer = {"Authorization": f"Bearer {presence.token}"}

    def ask(self, method: str, path: str, **options: Any) -> requests.Response:
        """No token unless ``headers`` or ``cookies`` bring one; redirects are left alone."""
        url = f"{self.presence.url}{path}"
        return requests.request(method, url, timeout=30, allow_redirects=False, **options)

    def known(self, method: str, path: str, **options: Any) -> requests.Response:
        return self.ask(method, path, headers={**self.bearer, **options.pop("headers", {})}, **options)

    def browser(self) -> dict[str, str]:
        """The cookie of a new browser session, opened by a one-time link."""
        token = self.known("POST", "/api/v1/links").json()["token"]
        return {self.cookie: self.ask("GET", f"/?token={token}").cookies[self.cookie]}


@pytest.fixture
def console(shared: Any) -> Console:
    return Console(find(shared.settings.home))


def told(response: requests.Response) -> str:
    """The one line of an error's body, which has nothing else."""
    body = response.json()
    assert list(body) == ["error"]
    assert "\n" not in body["error"]
    return str(body["error"])


@pytest.mark.parametrize("path", ["/", "/api/v1/state", "/api/v1/events", "/static/live.js", "/nothing"])
@pytest.mark.parametrize("authorization", [None, "Bearer wrong", "Basic eDp5", "Bearer ", "Bearer ünknown"])
def test_nothing_is_told_without_the_token(console: Console, path: str, authorization: str | None) -> None:
    headers = {"Authorization": authorization.encode()} if authorization else {}
    response = console.ask("GET", path, headers=headers)
    assert response.status_code == 401
    assert "trimtab status" in told(response)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1.evil.example:{port}"]
)
def test_a_foreign_host_is_refused_even_with_the_token(console: Console, host: str) -> None:
    name = host.format(port=console.host.partition(":")[2])
    response = console.known("GET", "/api/v1/state", headers={"Host": name})
    assert response.status_code == 421
    assert repr(name) in told(response)


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://{host}", "http://127.0.0.1:1"])
def test_a_foreign_origin_is_refused_even_with_a_session(console: Console, origin: str) -> None:
    name = origin.format(host=console.host)
    response = console.ask("POST", "/api/v1/links", headers={"Origin": name}, cookies=console.browser())
    assert response.status_code == 403
    assert repr(name) in told(response)


def test_a_link_opens_once_and_its_cookie_is_out_of_reach_of_scripts(console: Console) -> None:
    token = console.known("POST", "/api/v1/links").json()["token"]
    first = console.ask("GET", f"/?token={token}")
    assert (first.status_code, first.headers["location"]) == (303, "/")
    for part in (f"{console.cookie}=", "HttpOnly", "SameSite=strict", "Path=/"):
        assert part in first.headers["set-cookie"]
    assert first.headers["referrer-policy"] == "no-referrer"
    second = console.ask("GET", f"/?token={token}")
    assert second.status_code == 401
    assert "used already" in told(second)
    assert "set-cookie" not in second.headers
    assert console.ask("GET", "/", cookies={console.cookie: first.cookies[console.cookie]}).status_code == 200


def test_the_controller_s_token_is_no_link_and_a_link_s_token_is_no_bearer(console: Console) -> None:
    assert console.ask("GET", f"/?token={console.presence.token}").status_code == 401
    link = console.known("POST", "/api/v1/links").json()["token"]
    assert console.ask("GET", "/api/v1/state", headers={"Authorization": f"Bearer {link}"}).status_code == 401


def test_a_browser_writes_only_with_its_origin(console: Console) -> None:
    cookies = console.browser()
    assert console.ask("GET", "/api/v1/state", cookies=cookies).status_code == 200
    without = console.ask("POST", "/api/v1/links", cookies=cookies)
    assert without.status_code == 403
    assert "Origin" in told(without)
    own = {"Origin": f"http://{console.host}"}
    assert console.ask("POST", "/api/v1/links", cookies=cookies, headers=own).status_code == 200


@pytest.mark.parametrize("path", ["/", "/api/v1/state", "/static/console.css", "/api/v1/rollouts/99"])
@pytest.mark.parametrize("known", [True, False])
def test_every_answer_carries_the_security_headers(console: Console, path: str, known: bool) -> None:
    headers = (console.known if known else console.ask)("GET", path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/api/v1/rollouts/99", 409),
        ("POST", "/api/v1/rollouts/99/pause", 409),
        ("POST", "/api/v1/rollouts/99/explode", 422),
        ("GET", "/api/v1/rollouts/first", 422),
        ("GET", "/api/v1/rollouts/0", 422),
        ("GET", "/api/v1/experiments/99", 404),
        ("GET", f"/api/v1/experiments/{2**70}", 422),
        ("GET", f"/api/v1/decisions?after={2**70}", 422),
        ("GET", "/api/v1/nothing", 404),
        ("GET", "/static/../access.py", 404),
        ("GET", "/static/%2e%2e/access.py", 404),
        ("PUT", "/api/v1/state", 405),
    ],
)
def test_what_is_not_there_is_one_line_of_json(console: Console, method: str, path: str, status: int) -> None:
    response = console.known(method, path)
    assert response.status_code == status
    assert told(response)


@pytest.mark.parametrize("path", ["/api/v1/rollouts", "/api/v1/gates"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"knobs": 3}',
        b'{"knobs": {"max_num_seqs": [1]}}',
        b'{"knobs": {}, "more": 1}',
        b'{"knobs": {}, "inject": "slow\\u0000decode"}',
        b'{"knobs": {}, "inject": "\\ud800"}',
    ],
)
def test_a_bad_body_is_refused(console: Console, path: str, body: bytes) -> None:
    response = console.known("POST", path, data=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 422
    assert told(response)


@pytest.mark.parametrize(
    ("knobs", "part"),
    [
        ({"max_seqs": 1}, "accepted: quantization"),
        ({"max_num_seqs": 100000}, "1 to 256"),
        ({"max_num_seqs": "many"}, "max_num_seqs"),
        ({"quantization": "fp8"}, "fp32, bf16, int8, int4"),
        ({"kv_low_watermark": 0.99}, "must not exceed"),
    ],
)
def test_a_knob_that_the_engine_cannot_take_is_refused(console: Console, knobs: dict[str, Any], part: str) -> None:
    for path in ("/api/v1/rollouts", "/api/v1/gates"):
        response = console.known("POST", path, json={"knobs": knobs})
        assert response.status_code == 409
        assert part in told(response)


def test_an_unchecked_configuration_starts_no_rollout(console: Console) -> None:
    response = console.known("POST", "/api/v1/rollouts", json={"knobs": {"max_num_seqs": 7}})
    assert response.status_code == 409
    assert "offline gate" in told(response)
    assert console.known("GET", "/api/v1/rollouts").json() == []


def test_the_page_shows_the_target_and_has_nothing_inline(console: Console) -> None:
    state = console.known("GET", "/api/v1/state").json()
    page = console.ask("GET", "/", cookies=console.browser())
    assert page.headers["content-type"].startswith("text/html")
    for shown in (state["target"]["name"], state["target"]["model"], state["target"]["url"], "quick"):
        assert shown in page.text
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=|javascript:", page.text)
    sources = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert sorted(sources) == ["/static/console.css", "/static/live.js"]
    for path in sources:
        assert console.ask("GET", path, cookies=console.browser()).status_code == 200


def test_the_script_fills_only_elements_that_the_page_has(console: Console) -> None:
    page, script = console.known("GET", "/").text, console.known("GET", "/static/live.js").text
    used = set(re.findall(r'byId\("([^"]+)"\)', script)) | set(re.findall(r'facts\("([^"]+)"', script))
    assert used <= set(re.findall(r'id="([^"]+)"', page))
    assert "innerHTML" not in script


def states(response: requests.Response) -> Iterator[dict[str, Any]]:
    """The states of an event stream, as they come."""
    event = None
    for line in response.iter_lines(chunk_size=1, decode_unicode=True):
        if line.startswith("event: "):
            event = line.removeprefix("event: ")
        elif line.startswith("data: "):
            assert event == "state"
            yield json.loads(line.removeprefix("data: "))


def open_connections(pid: int, port: int) -> int:
    """The connections that the controller holds on its console's port."""
    held = psutil.Process(pid).net_connections("tcp")
    return sum(c.laddr.port == port and c.status in ("ESTABLISHED", "CLOSE_WAIT") for c in held)


def test_a_client_that_goes_away_ends_its_stream(shared: Any, console: Console) -> None:
    port = int(console.host.partition(":")[2])
    shared.until(lambda: open_connections(console.presence.pid, port) == 0, "connections are left from before", 20)
    streams = [console.known("GET", "/api/v1/events", stream=True) for _ in range(8)]
    readers = [states(s) for s in streams]  # a reader that is let go closes its stream
    assert all(next(r)["target"]["name"] == "tiny" for r in readers)
    assert open_connections(console.presence.pid, port) == 8
    for stream in streams:
        stream.close()
    shared.until(lambda: open_connections(console.presence.pid, port) == 0, "streams outlive their clients", 20)


def test_events_tell_the_state_and_every_change(shared: Any, console: Console) -> None:
    cookies = console.browser()
    with closing(console.ask("GET", "/api/v1/events", cookies=cookies, stream=True)) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        seen = states(stream)
        first = next(seen)
        assert first["rollout"] is None
        rollout_id = shared.start_rollout({"max_num_seqs": 5})
        shared.api.post(f"/rollouts/{rollout_id}/abort")
        phases = []
        for state in seen:
            if state["rollout"] is not None and state["rollout"]["phase"] not in phases:
                phases.append(state["rollout"]["phase"])
            if "rolled_back" in phases:
                break
    assert phases[-1] == "rolled_back"
    kinds = [d["kind"] for d in console.known("GET", "/api/v1/decisions").json()]
    assert kinds[:3] == ["manifests", "gate", "rollout_started"]
    assert "abort" in kinds


def test_a_controller_ends_without_waiting_for_open_pages_and_forgets_sessions(shared: Any, console: Console) -> None:
    cookies = console.browser()
    with closing(console.known("GET", "/api/v1/events", stream=True)) as stream:
        seen = states(stream)
        assert next(seen)
        controller = shared.controllers.pop()
        controller.terminate()
        assert controller.wait(15) == 0
    shared.start()
    assert Console(find(shared.settings.home)).ask("GET", "/", cookies=cookies).status_code == 401
