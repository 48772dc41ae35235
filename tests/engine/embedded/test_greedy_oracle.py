"""The engine's fp32 greedy text against Hugging Face transformers, from weights that the gguf library dequantized.

A text is greedy exactly when each token is the likeliest one after those before it, so one forward pass of the oracle
over prompt and text checks all positions; the slow test lets the oracle write the texts itself. Where the oracle's
two best logits differ by less than ``TIE`` and the engine took the other one, that is counted as a tie and printed.
"""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from trimtab.engine.contract import KnobValue
from trimtab.engine.embedded.loader import LoadedModel, load_model

pytestmark = pytest.mark.model

TIE = 1e-3

PROMPTS = (
    "The capital of France is", "Once upon a time, in a village by the sea,", "def fibonacci(n):\n",
    "Water boils at", "one two three one two three one two three one", "The three primary colours are",
    "Dear Sir or Madam,\n\nI am writing", "In 1905, Albert Einstein", "Q: What is 12 times 12?\nA:",
    "The quick brown fox", "1, 1, 2, 3, 5, 8, 13,", "To make bread, first", "SELECT name FROM users WHERE",
    "<|im_start|>user\nWho wrote Hamlet?<|im_end|>\n<|im_start|>assistant\n", "Photosynthesis is the process by",
    "import numpy as np\n\n", "It was a dark and stormy night;", "The moon orbits the Earth because",
    "- apples\n- pears\n- plums\n-", "Ünïcödé, 日本語 and emoji 🙂 are",
)  # fmt: skip


@pytest.fixture(scope="module")
def loaded(model_path: Path) -> LoadedModel:
    return load_model(model_path, "fp32")


@pytest.fixture(scope="module")
def oracle(model_path: Path) -> Any:
    return hugging_face_model(gguf.GGUFReader(model_path))


def hugging_face_model(reader: Any) -> Any:
    """transformers' Llama with the file's weights; llama.cpp's order of the rows of q and k is undone."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def value(key: str) -> Any:
        return reader.get_field(f"llama.{key}").contents()

    num_heads, num_kv_heads = value("attention.head_count"), value("attention.head_count_kv")
    weights = {t.name: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy()) for t in reader.tensors}
    config = LlamaConfig(
        vocab_size=weights["token_embd.weight"].shape[0],
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base")},
        tie_word_embeddings=True,
    )
    parts = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    state = {
        "model.embed_tokens.weight": weights["token_embd.weight"],
        "model.norm.weight": weights["output_norm.weight"],
    }
    for layer in range(config.num_hidden_layers):
        for stored, name in parts.items():
            weight = weights[f"blk.{layer}.{stored}.weight"]
            if stored in ("attn_q", "attn_k"):
                heads = num_heads if stored == "attn_q" else num_kv_heads
                pairs = weight.view(heads, weight.shape[0] // heads // 2, 2, weight.shape[1])
                weight = pairs.transpose(1, 2).reshape(weight.shape)
            state[f"model.layers.{layer}.{name}.weight"] = weight
    model = LlamaForCausalLM(config).eval()
    missing = model.load_state_dict(state, strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) in ((["lm_head.weight"], []), ([], []))
    model.tie_weights()
    return model


def texts(loaded: LoadedModel, make: Any, num_tokens: int, count: int, **knobs: KnobValue) -> list[list[int]]:
    driver = make(loaded, **knobs)
    prompts = [loaded.tokenizer.encode(p, parse_special=True) for p in PROMPTS[:count]]
    heard = [driver.submit(p, max_output_tokens=num_tokens, ignore_eos=True) for p in prompts]
    driver.run()
    return [h.token_ids for h in heard]


def count_ties(loaded: LoadedModel, oracle: Any, written: list[list[int]]) -> int:
    """Asserts that every token is the oracle's choice or ties with it; returns how many tie."""
    num_ties = 0
    for prompt, text in zip(PROMPTS, written, strict=False):
        prompt_ids = loaded.tokenizer.encode(prompt, parse_special=True)
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt_ids + text])).logits[0, len(prompt_ids) - 1 : -1]
        gaps = logits.max(dim=-1).values - logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        assert gaps.max() < TIE, f"{prompt!r}: token {int(gaps.argmax())} differs by {gaps.max():.4f}"
        num_ties += int((gaps > 0).sum())
    print(f"{num_ties} ties in {sum(map(len, written))} tokens")
    return num_ties


ARMS: list[dict[str, KnobValue]] = [
    {"max_num_seqs": 16},
    {"max_num_seqs": 16, "speculative_method": "ngram", "speculative_k": 7},
    {"max_num_seqs": 5, "max_num_batched_tokens": 24, "prefill_chunk_tokens": 16, "speculative_method": "ngram"},
]


@pytest.mark.parametrize("knobs", ARMS)
def test_greedy_text_is_the_oracles_in_a_batch_and_with_drafts(
    loaded: LoadedModel, oracle: Any, make_driver: Any, knobs: dict[str, KnobValue]
) -> None:
    count_ties(loaded, oracle, texts(loaded, make_driver, 16, 8, **knobs))


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel, oracle: Any) -> list[list[int]]:
    return [oracle_text(loaded, oracle, prompt, 64) for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("knobs", [{"max_num_seqs": 1}, *ARMS])
def test_twenty_prompts_of_sixty_four_tokens_equal_what_the_oracle_writes(
    loaded: LoadedModel, oracle: Any, expected: list[list[int]], make_driver: Any, knobs: dict[str, KnobValue]
) -> None:
    written = texts(loaded, make_driver, 64, len(PROMPTS), **knobs)
    # After a tie the two texts go different ways, each of them greedy.
    if count_ties(loaded, oracle, written) == 0:
        assert written == expected


def oracle_text(loaded: LoadedModel, oracle: Any, prompt: str, num_tokens: int) -> list[int]:
    ids = torch.tensor([loaded.tokenizer.encode(prompt, parse_special=True)])
    with torch.inference_mode():
        whole = oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
    written: list[int] = whole[0, ids.shape[1] :].tolist()
    return written
