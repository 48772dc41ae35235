"""GGUF files: read right against the `gguf` package, and refused in one line when they are not whole."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize as oracle_dequantize
from gguf.quants import quantize as oracle_quantize
from hypothesis import given
from hypothesis import strategies as st

from trimtab.engine.embedded.gguf_blocks import dequantize
from trimtab.engine.embedded.gguf_file import GGUFFile, TensorType
from trimtab.engine.embedded.loader import load_model
from trimtab.engine.embedded.loader_gguf import GGUFWeights
from trimtab.errors import ModelFileError

TYPES = {
    TensorType.F32: gguf.GGMLQuantizationType.F32,
    TensorType.F16: gguf.GGMLQuantizationType.F16,
    TensorType.BF16: gguf.GGMLQuantizationType.BF16,
    TensorType.Q8_0: gguf.GGMLQuantizationType.Q8_0,
    TensorType.Q4_0: gguf.GGMLQuantizationType.Q4_0,
    TensorType.Q4_1: gguf.GGMLQuantizationType.Q4_1,
}
HIDDEN, HEADS, KV_HEADS, FFN, VOCABULARY = 64, 4, 2, 128, 260


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of Q and K rows, from Hugging Face's."""
    half = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, 2, half, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def random_tensors() -> dict[str, np.ndarray]:
    """A one-layer model by Hugging Face's names, in Hugging Face's row order."""
    rng = np.random.default_rng(0)
    shapes = {
        "q": (HIDDEN, HIDDEN), "k": (HIDDEN // 2, HIDDEN), "v": (HIDDEN // 2, HIDDEN), "o": (HIDDEN, HIDDEN),
        "gate": (FFN, HIDDEN), "up": (FFN, HIDDEN), "down": (HIDDEN, FFN), "embedding": (VOCABULARY, HIDDEN),
    }  # fmt: skip
    return {n: (rng.standard_normal(s) * 0.2).astype(np.float32) for n, s in shapes.items()}


def write_gguf(path: Path, kind: TensorType = TensorType.Q4_1, **changed: object) -> dict[str, np.ndarray]:
    """Writes a small model with the `gguf` package and returns the values that its tensors stand for."""
    writer = gguf.GGUFWriter(path, str(changed.get("architecture", "llama")))
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    alphabet = [chr(b) for b in range(33, 127)] + [chr(256 + i) for i in range(60)]
    tokens = ["<eos>", "<bos>", *alphabet, "ab"]
    tokens += [f"unused{i}" for i in range(VOCABULARY - len(tokens))]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    if "rotated" in changed:
        writer.add_rope_dimension_count(int(str(changed["rotated"])))
    if "add_bos" in changed:
        writer.add_add_bos_token(bool(changed["add_bos"]))
    values = random_tensors()
    stored: dict[str, np.ndarray] = {}

    def add(name: str, key: str, rows: np.ndarray) -> None:
        data = oracle_quantize(rows, TYPES[kind])
        stored[key] = oracle_dequantize(data, TYPES[kind]).reshape(rows.shape)
        if name != changed.get("without"):
            writer.add_tensor(name, data, raw_dtype=TYPES[kind])

    add("token_embd.weight", "embedding", values["embedding"])
    add("blk.0.attn_q.weight", "q", interleave(values["q"], HEADS))
    add("blk.0.attn_k.weight", "k", interleave(values["k"], KV_HEADS))
    for name, key in (
        ("attn_v", "v"),
        ("attn_output", "o"),
        ("ffn_gate", "gate"),
        ("ffn_up", "up"),
        ("ffn_down", "down"),
    ):
        add(f"blk.0.{name}.weight", key, values[key] if key != changed.get("transposed") else values[key].T.copy())
    for name in (
        "output_norm",
        "blk.0.attn_norm",
        "blk.0.ffn_norm",
        *([changed["more"]] if "more" in changed else ()),
    ):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.mark.parametrize("kind", list(TYPES))
def test_blocks_mean_what_the_gguf_package_says(kind: TensorType) -> None:
    rows = np.random.default_rng(1).standard_normal((3, 96)).astype(np.float32)
    data = oracle_quantize(rows, TYPES[kind])
    expected = oracle_dequantize(data, TYPES[kind]).reshape(rows.shape)
    found = dequantize(np.frombuffer(data.tobytes(), dtype=np.uint8), rows.shape, kind)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", list(TYPES))
def test_a_file_s_weights_come_out_in_hugging_face_s_order(tmp_path: Path, kind: TensorType) -> None:
    stored = write_gguf(tmp_path / "m.gguf", kind)
    with GGUFFile(tmp_path / "m.gguf") as file:
        weights = GGUFWeights(file, "m.gguf")
        v = weights.dense("model.layers.0.self_attn.v_proj").numpy()
        np.testing.assert_array_equal(v, stored["v"])
        q = weights.dense("model.layers.0.self_attn.q_proj").numpy()
        np.testing.assert_array_equal(interleave(q, HEADS), stored["q"])
        blocks = weights.blocks("model.layers.0.self_attn.k_proj")
        if kind in (TensorType.Q4_0, TensorType.Q4_1, TensorType.Q8_0):
            assert blocks is not None
            k = weights.dense("model.layers.0.self_attn.k_proj").numpy()
            np.testing.assert_array_equal(blocks.dequantize(), k)
        else:
            assert blocks is None


@pytest.mark.parametrize("quantization", ["fp32", "bf16", "int8", "int4"])
def test_every_quantization_loads(tmp_path: Path, quantization: str) -> None:
    write_gguf(tmp_path / "m.gguf")
    loaded = load_model(tmp_path / "m.gguf", quantization)
    assert loaded.model.kv_dtype is (torch.float32 if quantization == "fp32" else torch.bfloat16)
    assert loaded.tokenizer.eos_ids == {0}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"architecture": "gemma3"}, "accepted: llama"),
        ({"without": "blk.0.attn_v.weight"}, "attn_v.weight is missing"),
        ({"transposed": "gate"}, "shape"),
        ({"more": "blk.0.attn_q.bias"}, "bias.weight is not built"),
        ({"rotated": 8}, "dimension_count is 8"),
    ],
)
def test_another_model_is_refused_by_name(tmp_path: Path, changed: dict[str, object], told: str) -> None:
    write_gguf(tmp_path / "m.gguf", **changed)
    with pytest.raises(ModelFileError, match=told):
        load_model(tmp_path / "m.gguf", "fp32")


@pytest.mark.parametrize(("changed", "num_bos"), [({"add_bos": True}, 1), ({"add_bos": False}, 0), ({}, 0)])
def test_texts_begin_with_bos_where_the_file_says_so(
    tmp_path: Path, changed: dict[str, object], num_bos: int
) -> None:
    write_gguf(tmp_path / "model.gguf", **changed)
    tokenizer = load_model(tmp_path / "model.gguf", "fp32").tokenizer
    for text in ("ab", "<bos>ab"):
        ids = tokenizer.encode(text, parse_special=True)
        assert ids.count(1) == max(num_bos, text.count("<bos>"))
        assert ids[-1] == tokenizer.encode("ab", parse_special=False)[-1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path)
    return path.read_bytes()


def refused_or_loaded(folder: Path, data: bytes) -> str | None:
    path = folder / "damaged.gguf"
    path.write_bytes(data)
    told = None
    try:
        load_model(path, "fp32")
    except ModelFileError as error:
        told = str(error)
    assert told is None or "\n" not in told
    return told


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.1, 0.3, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_one_clear_error(tmp_path: Path, whole: bytes, share: float) -> None:
    told = refused_or_loaded(tmp_path, whole[: int(len(whole) * share)])
    assert told is not None
    assert "damaged.gguf" in told


@given(offset=st.integers(0, 9000), flipped=st.integers(1, 255))
def test_a_flipped_byte_never_crashes(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, offset: int, flipped: int
) -> None:
    damaged = bytearray(whole)
    damaged[offset % len(damaged)] ^= flipped
    refused_or_loaded(tmp_path_factory.getbasetemp(), bytes(damaged))


@pytest.mark.parametrize("position", [8, 16, 24])
@pytest.mark.parametrize("value", [2**63, 2**40, 2**32 - 1])
def test_a_giant_count_is_refused_before_memory_is_taken(
    tmp_path: Path, whole: bytes, position: int, value: int
) -> None:
    damaged = whole[:position] + struct.pack("<Q", value) + whole[position + 8 :]
    assert refused_or_loaded(tmp_path, damaged) is not None


@pytest.mark.parametrize("key", ["llama.block_count", "llama.context_length", "tokenizer.ggml.eos_token_id"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_count_that_is_no_number_is_refused(tmp_path: Path, whole: bytes, key: str, value: float) -> None:
    at = whole.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key)
    damaged = whole[:at] + struct.pack("<If", 6, value) + whole[at + 8 :]
    assert refused_or_loaded(tmp_path, damaged) is not None


def test_tensors_that_share_their_bytes_are_refused(tmp_path: Path, whole: bytes) -> None:
    """A small file could ask for any amount of memory else."""
    name = b"blk.0.ffn_up.weight"
    at = whole.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    (num_dimensions,) = struct.unpack("<I", whole[at : at + 4])
    at += 4 + 8 * num_dimensions + 4
    damaged = whole[:at] + struct.pack("<Q", 0) + whole[at + 8 :]
    assert "overlap" in (refused_or_loaded(tmp_path, damaged) or "")


@pytest.mark.parametrize(
    "data", [b"", b"GGUF", b"PK\x03\x04 not a model", b"GGUF" + struct.pack("<I", 99) + b"\0" * 64]
)
def test_an_unknown_file_is_refused(tmp_path: Path, data: bytes) -> None:
    assert refused_or_loaded(tmp_path, data) is not None


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot be read"):
        load_model(tmp_path / "nothing.gguf", "fp32")
