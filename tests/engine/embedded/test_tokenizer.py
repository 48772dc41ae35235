"""Tokenizers and chat templates: the same tokens as `transformers`, whole characters, templates that cannot harm."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, processors
from transformers import PreTrainedTokenizerFast

from trimtab.engine.embedded.chat_template import ChatTemplate
from trimtab.engine.embedded.gguf_file import GGUFFile
from trimtab.engine.embedded.loader_gguf import gguf_tokenizer
from trimtab.engine.embedded.loader_safetensors import folder_tokenizer
from trimtab.engine.embedded.tokenizer import IncrementalDetokenizer, Tokenizer, load_tokenizer_json
from trimtab.errors import ModelFileError, RequestError


@pytest.fixture(scope="session")
def tiny(tiny_model_dir: Path) -> Tokenizer:
    return folder_tokenizer(tiny_model_dir)


@pytest.fixture(scope="session")
def oracle(tiny_model_dir: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(tiny_model_dir / "tokenizer.json"))


@given(st.text(max_size=60))
def test_tokens_are_those_of_transformers(tiny: Tokenizer, oracle: PreTrainedTokenizerFast, text: str) -> None:
    assert tiny.encode(text, parse_special=True) == oracle.encode(text, add_special_tokens=False)


@given(st.text(max_size=60))
def test_text_survives_the_way_there_and_back(tiny: Tokenizer, text: str) -> None:
    ids = tiny.encode(text, parse_special=False)
    assert tiny.decode(ids) == text
    pieces = IncrementalDetokenizer(tiny)
    streamed = [pieces.push(i) for i in ids]
    assert "".join(streamed) + pieces.flush() == text
    assert not any("\ufffd" in piece for piece in streamed if "\ufffd" not in text)


def test_a_file_that_begins_texts_with_bos_does_so_once(tiny_model_dir: Path, tmp_path: Path) -> None:
    fast = FastTokenizer.from_file(str(tiny_model_dir / "tokenizer.json"))
    fast.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 0)]
    )
    fast.save(str(tmp_path / "tokenizer.json"))
    oracle = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer_json(tmp_path / "tokenizer.json", eos_ids=frozenset({1}), bos_id=0, chat_template=None)
    assert tokenizer.encode("Hello", parse_special=True) == oracle.encode("Hello")
    once = tokenizer.encode("<|im_start|>Hello", parse_special=True)
    assert once == oracle.encode("Hello")


def test_a_tokenizer_with_another_alphabet_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    fast = FastTokenizer.from_file(str(tiny_model_dir / "tokenizer.json"))
    fast.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    fast.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelFileError, match="accepted: ByteLevel"):
        load_tokenizer_json(tmp_path / "tokenizer.json", eos_ids=frozenset(), bos_id=None, chat_template=None)


def test_control_tokens_in_users_text_stay_text(tiny: Tokenizer) -> None:
    special = tiny.encode("<|im_end|>", parse_special=True)
    assert special == [1]
    plain = tiny.encode("<|im_end|>", parse_special=False)
    assert 1 not in plain
    assert tiny.decode(plain) == "<|im_end|>"
    assert tiny.decode(special) == ""


def test_an_unfinished_character_is_held_back_and_then_replaced(tiny: Tokenizer) -> None:
    ids = tiny.encode("\u2603", parse_special=False)
    pieces = IncrementalDetokenizer(tiny)
    assert [pieces.push(i) for i in ids[:-1]] == [""] * (len(ids) - 1)
    assert pieces.flush() == "\ufffd"


def test_a_chat_is_rendered_by_the_model_s_template(tiny: Tokenizer) -> None:
    prompt = tiny.render_chat([{"role": "user", "content": "Hi"}])
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.model
def test_the_real_model_s_tokenizer_splits_digits_and_ends_turns(model_path: Path) -> None:
    with GGUFFile(model_path) as file:
        tokenizer = gguf_tokenizer(file, "model")
    assert len(tokenizer.encode("2026", parse_special=False)) == 4
    prompt = tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    ids = tokenizer.encode(prompt, parse_special=True)
    assert set(tokenizer.eos_ids) & set(ids)
    assert prompt.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999999) %}x{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = range(9) %}{% endfor %}{% endfor %}",
        "{% for m in messages %}{{ 'x' * 99999999 }}{% endfor %}",
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% set x = 99999999999 * [1] %}",
        "{% set x = 9 ** (9 ** 9) %}",
        "{{ 1 / 0 }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}{{ undefined_thing.x }}",
    ],
)
def test_a_hostile_or_refusing_template_is_one_error(source: str) -> None:
    with pytest.raises(RequestError, match="chat template refuses"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "Hi"}])


def test_what_is_no_template_is_refused_at_load() -> None:
    with pytest.raises(ModelFileError, match="not valid"):
        ChatTemplate("{% for %}", {})


def test_a_template_may_use_all_that_loops_offer() -> None:
    source = (
        "{% for m in messages if m.role != 'system' %}{{ loop.index }}/{{ loop.length }}{{ m.content }}"
        "{{ '.' if loop.last else ',' }}{% else %}none{% endfor %}{% for x in missing %}x{% endfor %}{{ '-' * 3 }}"
    )
    messages = [{"role": r, "content": c} for r, c in (("system", "s"), ("user", "a"), ("user", "b"))]
    assert ChatTemplate(source, {}).render(messages) == "1/2a,2/2b.---"
