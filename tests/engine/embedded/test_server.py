"""The real server process: bad input, disconnects, a full queue, draining, the admin port."""

import asyncio
import json
import shutil
import signal
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from safetensors.torch import load_file, save_file

from trimtab.engine.adapters.embedded import CATALOGUE, METRIC_NAMES, EmbeddedAdapter
from trimtab.engine.contract import EngineEndpoint, RequestOutcome
from trimtab.errors import EngineCallError

LONG = {"max_tokens": 400, "ignore_eos": True}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"max_tokens": "5"}, 400, "max_tokens"),
        ({"max_tokens": 10**9}, 400, "max_tokens"),
        ({"temperature": 9}, 400, "temperature"),
        ({"model": "other"}, 404, "model"),
        ({"model": 5}, 400, "model"),
        ({"prompt": [1] * 100_000}, 400, "prompt"),
        ({"prompt": [999_999]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": {"a": 1}}, 400, "prompt"),
        ({"prompt": [True]}, 400, "prompt"),
        ({"n": 2}, 400, "n"),
        ({"tools": [{}]}, 400, "tools"),
        ({"logprobs": 21}, 400, "logprobs"),
        ({"stop": ["x"] * 17}, 400, "stop"),
        ({"nonsense": 1}, 400, "nonsense"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ],
)
def test_bad_fields_are_refused_by_name_and_the_engine_goes_on(
    engine: Any, fields: dict[str, Any], status: int, param: str
) -> None:
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 2} | fields
    assert error_of(engine.http.post("/v1/completions", json=body), status)["param"] == param
    assert engine.complete("still here", max_tokens=2)["usage"]["completion_tokens"] >= 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"model": NaN}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"model": "tiny"}',
        b'{"model": "tiny", "prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "tiny", "messages": [{"role": "\xed\xa0\x80", "content": "a"}]}',
        b'{"model": "tiny", "\\ud800": 1}',
    ],
)
def test_bodies_that_are_not_requests_are_refused(engine: Any, content: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        error_of(engine.http.post(path, content=content), 400)
    assert engine.complete("still here", max_tokens=2)


def test_bad_chats_are_refused(engine: Any) -> None:
    for messages in ([], [{}], [{"role": "user"}], [{"role": "user", "content": [{"type": "image_url"}]}], "hi"):
        body = {"model": "tiny", "messages": messages}
        assert error_of(engine.http.post("/v1/chat/completions", json=body), 400)["param"].startswith("messages")


def test_a_ten_megabyte_prompt_is_refused_unread(engine: Any) -> None:
    body = json.dumps({"model": "tiny", "prompt": "word " * 2_000_000}).encode()
    assert "bytes" in error_of(engine.http.post("/v1/completions", content=body), 413)["message"]
    chunked = iter([b'{"model": "tiny", "prompt": "', *[b"word " * 20_000] * 100, b'"}'])
    error_of(engine.http.post("/v1/completions", content=chunked), 413)
    assert engine.complete("still here", max_tokens=2)


def test_unknown_paths_and_methods_are_errors_in_the_same_shape(engine: Any) -> None:
    error_of(engine.http.get("/v1/nothing"), 404)
    error_of(engine.http.get("/v1/completions"), 405)


def test_neutral_and_harmless_fields_are_accepted(engine: Any) -> None:
    assert engine.complete(
        "hi", max_tokens=2, n=1, best_of=1, user="me", logit_bias={}, frequency_penalty=0.0, presence_penalty=0,
        suffix=None, stop=None, repetition_penalty=1.0, top_k=-1, temperature=None,
    )  # fmt: skip


def test_the_request_id_is_taken_over_or_made(engine: Any) -> None:
    response = engine.http.post(
        "/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 1}, headers={"x-request-id": "my-id.7"}
    )
    assert response.headers["x-request-id"] == "my-id.7"
    assert response.json()["id"] == "cmpl-my-id.7"
    response = engine.http.get("/health", headers={"x-request-id": "x" * 500})
    assert len(response.headers["x-request-id"]) == 32


def test_prompt_logprobs_name_every_token_by_id(engine: Any) -> None:
    ids = [5 + i % 300 for i in range(200)]
    answer = engine.complete(ids, max_tokens=0, echo=True, logprobs=20)
    choice = answer["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    assert len(choice["prompt_logprobs"]) == len(choice["logprobs"]["tokens"]) == 200
    for token_id, position, value in zip(
        ids[1:], choice["prompt_logprobs"][1:], choice["logprobs"]["token_logprobs"][1:], strict=True
    ):
        assert position[str(token_id)]["logprob"] == value
        assert sorted(e["rank"] for e in position.values())[:20] == list(range(1, 21))
    assert answer["usage"] == {
        "prompt_tokens": 200,
        "completion_tokens": 0,
        "total_tokens": 200,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    plain = engine.complete(ids, max_tokens=1, prompt_logprobs=2, temperature=0)["choices"][0]
    assert plain["logprobs"] is None
    assert plain["prompt_logprobs"][7][str(ids[7])]["logprob"] == pytest.approx(
        choice["prompt_logprobs"][7][str(ids[7])]["logprob"], abs=1e-4
    )


def test_stop_strings_work_in_streams(engine: Any) -> None:
    fields = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    text = engine.complete("count", **fields)["choices"][0]["text"]
    stop = text[10:13]
    body = {"model": "tiny", "prompt": "count", "stream": True, "stop": [stop], **fields}
    with engine.http.stream("POST", "/v1/completions", json=body) as response:
        events = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    choices = [json.loads(e)["choices"][0] for e in events[:-1]]
    assert "".join(c["text"] for c in choices) == text[: text.index(stop)]
    assert choices[-1]["finish_reason"] == "stop"


def test_continuous_usage_counts_up(engine: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "tiny", "prompt": "count", "stream": True, "stream_options": options, "max_tokens": 5}
    answer = engine.http.post("/v1/completions", json=body | {"ignore_eos": True})
    events = [json.loads(x[6:]) for x in answer.text.splitlines() if x.startswith("data: {")]
    assert [e["usage"]["completion_tokens"] for e in events] == [1, 2, 3, 4, 5, 5]
    assert events[-1]["choices"] == []


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_its_blocks(engine: Any, stream: bool) -> None:
    before = engine.metric('trimtab_engine_requests_total{outcome="cancelled"}')
    body = {"model": "tiny", "prompt": "a", "stream": stream, "max_tokens": 480, "ignore_eos": True}
    content = json.dumps(body).encode()
    with socket.create_connection((engine.http.base_url.host, engine.http.base_url.port)) as sock:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        sock.sendall(head.encode() + content)
        engine.wait_for(lambda: engine.metric(METRIC_NAMES.running) == 1)
    engine.wait_for(lambda: engine.metric('trimtab_engine_requests_total{outcome="cancelled"}') == before + 1)
    assert engine.metric(METRIC_NAMES.running) == 0
    assert engine.metric(METRIC_NAMES.kv_usage_ratio) == 0
    assert engine.admin.get("/admin/drain").json()["num_in_flight"] == 0


def test_every_announced_metric_is_exported(engine: Any) -> None:
    engine.complete("a", max_tokens=3, ignore_eos=True)
    text = engine.http.get("/metrics").text
    for name in METRIC_NAMES.__slots__:
        metric = getattr(METRIC_NAMES, name)
        assert f"\n# TYPE {metric.removesuffix('_total')}" in text, name
    assert "trimtab_engine_info{" in text
    assert "process_resident_memory_bytes" in text


def test_the_admin_port_needs_its_token(engine: Any) -> None:
    for headers in ({"Authorization": "Bearer wrong"}, {"Authorization": ""}, {}):
        response = httpx.get(f"{engine.admin.base_url}/admin/knobs", headers=headers)
        error_of(response, 401)
    error_of(engine.http.get("/admin/knobs"), 404)


def test_only_live_knobs_change(engine: Any) -> None:
    before = engine.admin.get("/admin/knobs").json()
    assert (set(before["knobs"]), before["inject"]) == (set(CATALOGUE.names), None)
    refused = engine.admin.patch("/admin/knobs", json={"max_num_seqs": 3, "block_size": 8})
    assert "max_num_seqs" in error_of(refused, 400)["message"]
    error_of(engine.admin.patch("/admin/knobs", json={"max_num_seqs": 0}), 400)
    error_of(engine.admin.patch("/admin/knobs", json={"kv_high_watermark": 0.2}), 400)
    error_of(engine.admin.patch("/admin/knobs", json=[]), 400)
    assert engine.admin.get("/admin/knobs").json() == before
    after = engine.admin.patch("/admin/knobs", json={"max_num_seqs": 3}).json()
    assert after["knobs"] == before["knobs"] | {"max_num_seqs": 3}
    assert f'configuration="{after["configuration"]}"' in engine.http.get("/metrics").text
    assert engine.admin.patch("/admin/knobs", json={"max_num_seqs": 32}).json() == before


def test_beyond_loopback_traffic_needs_the_api_key(start_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_ENGINE_API_KEY", "key")
    engine = start_engine("--host", "0.0.0.0")
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    error_of(engine.http.post("/v1/completions", json=body), 401)
    error_of(engine.http.get("/metrics"), 401)
    for path in ("/health", "/ready"):
        assert engine.http.get(path).status_code == 200
    answer = engine.http.post("/v1/completions", json=body, headers={"Authorization": "Bearer key"})
    assert answer.status_code == 200
    assert engine.terminate() == 0


def test_a_prompt_of_one_token_has_no_scores_but_keeps_the_shape(engine: Any) -> None:
    choice = engine.complete([5], max_tokens=0, echo=True, logprobs=3)["choices"][0]
    assert choice["prompt_logprobs"] == [None]
    assert choice["logprobs"]["token_logprobs"] == [None]
    assert choice["finish_reason"] == "length"


async def test_the_adapters_client_reads_and_steers_it(engine: Any) -> None:
    async with aiohttp.ClientSession() as http:
        endpoint = EngineEndpoint(
            engine.base_url, str(engine.admin.base_url).rstrip("/"), engine.admin.headers["Authorization"][7:], "tiny"
        )
        client = EmbeddedAdapter().client(http, endpoint)
        assert await client.is_ready()
        cursor = (await client.records_since(0)).next_cursor
        body = {"model": "tiny", "prompt": "a", "max_tokens": 3, "ignore_eos": True}
        async with http.post(
            f"{engine.base_url}/v1/completions", json=body, headers={"x-request-id": "me"}
        ) as answer:
            assert answer.status == 200
        page = await client.records_since(cursor)
        assert [(r.request_id, r.output_tokens, r.outcome) for r in page.records] == [
            ("me", 3, RequestOutcome.SUCCEEDED)
        ]
        assert (await client.set_live_knobs({"speculative_method": "ngram"}))["speculative_method"] == "ngram"
        await client.set_live_knobs({"speculative_method": "off"})
        with pytest.raises(EngineCallError, match="not a live knob"):
            await client.set_live_knobs({"num_threads": 2})
        assert (await client.set_draining(True)).draining
        assert not await client.is_ready()
        async with http.post(f"{engine.base_url}/v1/completions", json=body) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert (await client.records_since(page.next_cursor)).records[-1].outcome is RequestOutcome.REFUSED
        assert not (await client.set_draining(False)).draining
        assert await client.is_ready()


async def test_live_changes_under_load_lose_nothing(engine: Any) -> None:
    async with aiohttp.ClientSession() as http:
        expected: dict[int, str] = {}

        async def ask(index: int) -> str:
            body = {"model": "tiny", "prompt": f"number {index % 5}", "seed": index % 5, "max_tokens": 30}
            async with http.post(f"{engine.base_url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                text: str = (await answer.json())["choices"][0]["text"]
                return text

        for index in range(5):
            expected[index] = await ask(index)
        asked = [asyncio.create_task(ask(i)) for i in range(40)]
        headers = {"Authorization": engine.admin.headers["Authorization"]}
        for knobs in ({"max_num_seqs": 2}, {"max_num_batched_tokens": 16}, {"speculative_method": "ngram"}, {}):
            values = knobs or {"max_num_seqs": 32, "max_num_batched_tokens": 512, "speculative_method": "off"}
            async with http.patch(f"{engine.admin.base_url}/admin/knobs", json=values, headers=headers) as answer:
                assert answer.status == 200
        assert [await t for t in asked] == [expected[i % 5] for i in range(40)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_refused_in_the_queue_answers_429_streaming_or_not(start_engine: Any, stream: bool) -> None:
    engine = start_engine(max_num_seqs=1)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(engine.complete, "hi", **LONG)
        engine.wait_for(lambda: engine.metric("trimtab_engine_running_requests") == 1)
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 2, "deadline_ms": 50, "stream": stream}
        refused = engine.http.post("/v1/completions", json=body)
        assert "its deadline passed" in error_of(refused, 429)["message"]
        assert refused.headers["retry-after"] == "1"
        assert running.result()["usage"]["completion_tokens"] == 400


def test_prefill_warms_the_prefix_cache_for_the_same_salt_only(engine: Any) -> None:
    text = "It was a bright cold day in April, and the clocks were striking thirteen. " * 5
    body = {"model": "tiny", "prompt": text, "cache_salt": "mine"}
    warmed = engine.http.post("/v1/prefill", json=body)
    assert warmed.status_code == 200, warmed.text
    assert warmed.json()["object"] == "prefill"
    num_prompt = warmed.json()["usage"]["prompt_tokens"]
    assert warmed.json()["usage"]["completion_tokens"] == 0

    def cached(salt: str) -> int:
        answer = engine.complete(text + "Winston", max_tokens=2, cache_salt=salt)
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("somebody else's") == 0
    assert cached("mine") >= num_prompt // 16 * 16 - 16
    chat = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
    assert engine.http.post("/v1/prefill", json=chat).json()["usage"]["prompt_tokens"] > 16
    for bad in (
        {"model": "tiny"},
        body | {"messages": []},
        body | chat,
        body | {"max_tokens": 3},
        body | {"stream": True},
    ):
        error_of(engine.http.post("/v1/prefill", json=bad), 400)


def test_a_full_queue_answers_429_with_retry_after(start_engine: Any) -> None:
    engine = start_engine("--max-queue", "2", max_num_seqs=1)
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(engine.complete, "a", **LONG)]
        engine.wait_for(lambda: engine.metric(METRIC_NAMES.running) == 1)
        running += [pool.submit(engine.complete, "a", **LONG) for _ in range(2)]
        engine.wait_for(lambda: engine.metric(METRIC_NAMES.waiting) == 2)
        refused = engine.http.post("/v1/completions", json={"model": "tiny", "prompt": "a"})
        assert error_of(refused, 429)["code"] == "queue_full"
        assert refused.headers["Retry-After"] == "1"
        assert engine.metric('trimtab_engine_requests_total{outcome="refused"}') == 1
        assert all(r.result()["usage"]["completion_tokens"] == 400 for r in running)
    assert engine.terminate() == 0


def test_sigterm_finishes_what_is_in_flight_and_refuses_the_rest(start_engine: Any) -> None:
    engine = start_engine("--inject", "slow_decode=3")
    assert "fault_injection" in engine.log
    assert engine.admin.get("/admin/knobs").json()["inject"] == "slow_decode=3"
    assert 'inject="slow_decode=3"' in engine.http.get("/metrics").text
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.complete, "a", **LONG)
        engine.wait_for(lambda: engine.metric(METRIC_NAMES.running) == 1)
        engine.process.send_signal(signal.SIGTERM)
        engine.wait_for(lambda: engine.http.get("/ready").status_code == 503)
        refused = engine.http.post("/v1/completions", json={"model": "tiny", "prompt": "a"})
        assert error_of(refused, 503)["code"] == "draining"
        assert refused.headers["Retry-After"] == "1"
        assert running.result()["usage"]["completion_tokens"] == 400
    assert engine.process.wait(20) == 0, engine.log


@pytest.mark.parametrize("by", ["second signal", "time limit"])
def test_a_drain_can_be_cut_short(start_engine: Any, by: str) -> None:
    engine = start_engine("--inject", "slow_decode=50", *(("--drain-timeout-s", "0.3") if by == "time limit" else ()))
    failed = threading.Event()

    def ask() -> None:
        try:
            engine.complete("a", **LONG)
        except (httpx.TransportError, AssertionError):
            failed.set()

    thread = threading.Thread(target=ask)
    thread.start()
    engine.wait_for(lambda: engine.metric(METRIC_NAMES.running) == 1)
    engine.process.send_signal(signal.SIGTERM)
    if by == "second signal":
        engine.wait_for(lambda: "draining" in engine.log)
        engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(20) == 7, engine.log
    thread.join()
    assert failed.is_set()


@pytest.mark.parametrize(
    ("words", "token", "code", "message"),
    [
        (["--inject", "nonsense"], "t", 2, "slow_decode=FACTOR"),
        (["--knobs", '{"nonsense": 1}'], "t", 2, "accepted: quantization"),
        (["--port", "0"], "t", 2, "1 to 65535"),
        ([], "", 2, "TRIMTAB_ENGINE_ADMIN_TOKEN"),
        (["--model", "/nonexistent.gguf"], "t", 3, "/nonexistent.gguf"),
        (["--host", "0.0.0.0"], "t", 2, "TRIMTAB_ENGINE_API_KEY"),
    ],
)
def test_what_prevents_the_start_is_one_line_and_its_exit_code(
    run_engine: Any, words: list[str], token: str, code: int, message: str
) -> None:
    assert_one_line(run_engine(*words, token=token), code, message)


def test_weights_that_are_not_numbers_are_refused_before_anybody_is_served(
    run_engine: Any, tiny_model_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "corrupt"
    shutil.copytree(tiny_model_dir, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.v_proj.weight"][3, 5] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert_one_line(run_engine("--model", str(folder), token="t"), 3, "not numbers")


def test_a_taken_port_is_one_line_and_its_exit_code(run_engine: Any, engine: Any) -> None:
    port = str(engine.http.base_url.port)
    assert_one_line(run_engine("--port", port, token="t"), 4, f"127.0.0.1:{port}")


def assert_one_line(ended: "subprocess.CompletedProcess[str]", code: int, message: str) -> None:
    assert ended.returncode == code, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("trimtab engine: ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert "Traceback" not in ended.stderr
