"""Request bodies: any JSON is either understood or refused with a RequestError, never anything else."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.engine.embedded.openai_protocol import parse_chat, parse_completion
from trimtab.errors import RequestError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    [
        "model",
        "prompt",
        "messages",
        "max_tokens",
        "n",
        "stop",
        "stream",
        "stream_options",
        "logprobs",
        "tools",
        "seed",
    ]
)


@given(body=st.dictionaries(FIELDS, JSON, max_size=6) | JSON)
def test_any_json_is_a_query_or_a_request_error(body: Any) -> None:
    for parse in (parse_completion, parse_chat):
        with contextlib.suppress(RequestError):
            parse(body)


def test_openais_defaults() -> None:
    options = parse_completion({"model": "m", "prompt": "p"}).options
    assert (options.max_output_tokens, options.temperature, options.top_p) == (16, 1.0, 1.0)
    assert (
        parse_chat({"model": "m", "messages": [{"role": "user", "content": "p"}]}).options.max_output_tokens is None
    )
    assert parse_completion({"model": "m", "prompt": "p", "temperature": None}).options.temperature == 1.0


def test_requests_without_a_seed_get_different_ones() -> None:
    seeds = {parse_completion({"model": "m", "prompt": "p"}).options.seed for _ in range(20)}
    assert len(seeds) == 20


def test_text_parts_are_joined() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    query = parse_chat({"model": "m", "messages": [{"role": "user", "content": content}]})
    assert query.messages == ({"role": "user", "content": "ab"},)


def test_an_unsupported_feature_says_what_is_accepted() -> None:
    with pytest.raises(RequestError, match=r"best_of is not supported; accepted: 1"):
        parse_completion({"model": "m", "prompt": "p", "best_of": 3})
    with pytest.raises(RequestError, match=r"unknown parameter 'tempature'; accepted: cache_salt, .*temperature"):
        parse_completion({"model": "m", "prompt": "p", "tempature": 0})
