"""OpenAI's own Python client against the real server process."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI


@pytest.fixture(scope="module")
def client(engine: Any) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{engine.base_url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_the_model_is_listed(client: OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_a_completion_streams_the_text_that_it_answers_at_once(client: OpenAI) -> None:
    arguments: dict[str, Any] = {"model": "tiny", "prompt": "once upon a time", "max_tokens": 20, "seed": 3}
    whole = client.completions.create(**arguments)
    chunks = list(client.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    assert whole.usage is not None
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].choices == []
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert len(chunks) > 3


def test_a_chat_streams_the_text_that_it_answers_at_once(client: OpenAI) -> None:
    arguments: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "max_completion_tokens": 12,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 4,
    }
    whole = client.chat.completions.create(**arguments)
    chunks = list(client.chat.completions.create(**arguments, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    logprobs = whole.choices[0].logprobs
    assert whole.usage is not None
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == whole.usage.completion_tokens
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 4
        assert entry.logprob == max(t.logprob for t in entry.top_logprobs)
        assert entry.bytes is not None


def test_several_prompts_answer_in_order_and_ids_equal_text(client: OpenAI) -> None:
    texts = ["one", "two", "three"]
    together = client.completions.create(model="tiny", prompt=texts, max_tokens=8, temperature=0)
    assert [c.index for c in together.choices] == [0, 1, 2]
    for text, choice in zip(texts, together.choices, strict=True):
        alone = client.completions.create(model="tiny", prompt=text, max_tokens=8, temperature=0)
        assert alone.choices[0].text == choice.text
    assert together.usage is not None
    assert together.usage.completion_tokens <= 24


def test_echo_with_logprobs_covers_prompt_and_output(client: OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="once upon", max_tokens=5, echo=True, logprobs=3, temperature=0
    )
    choice = answer.choices[0]
    assert choice.text.startswith("once upon")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.token_logprobs is not None
    assert answer.usage is not None
    assert len(choice.logprobs.tokens) == answer.usage.total_tokens
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])


def test_errors_arrive_as_the_clients_own_exceptions(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="accepted: 'tiny'"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model="tiny", prompt="a", max_tokens=-1)
    with pytest.raises(openai.BadRequestError, match="n is not supported; accepted: 1"):
        client.completions.create(model="tiny", prompt="a", n=2)
    with pytest.raises(openai.BadRequestError, match="context length"):
        client.completions.create(model="tiny", prompt=[1] * 100_000)
