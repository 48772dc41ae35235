"""The pool's memory: accounted to the byte, and moved as the allocator lists it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from trimtab.engine.adapters.embedded import CATALOGUE
from trimtab.engine.embedded.config import ModelConfig
from trimtab.engine.embedded.kv.block import Move, MoveKind
from trimtab.engine.embedded.kv.cache import KVCache
from trimtab.engine.embedded.kv.layout import KVLayout
from trimtab.engine.embedded.kv.pool import KVPool
from trimtab.engine.embedded.kv.storage import KVStorage
from trimtab.errors import KnobError
from trimtab.kernels.kv_cache import BlockSlot, KVType, dequantize, quantize

FULL, INT8, INT4 = KVType
MODEL = ModelConfig(100, 32, 3, 4, 2, 8, 64, 512, 1e-5, 10000.0, tied_head=True)


def make(num_pages: int = 12, swap_file: Path | None = None, dtype: str = "auto") -> KVPool:
    layout = KVLayout.of(MODEL, 4, torch.bfloat16, dtype)
    return KVPool(layout, KVStorage.touched(layout, num_pages), KVStorage.lazy(layout, 5, swap_file))


def block(pool: KVPool, slot: BlockSlot) -> Tensor:
    """One block's keys and values of all layers in float32."""
    found = []
    for index in range(MODEL.num_layers):
        for side in pool.layer(index):
            typed = side[slot.kv_type]
            scales = None if typed.scales is None else typed.scales[slot.number]
            found.append(dequantize(typed.values[slot.number], scales, torch.float32))
    return torch.stack(found)


def fill(pool: KVPool, number: int) -> Tensor:
    """Random content of the full block ``number``; returns it."""
    for index in range(MODEL.num_layers):
        for side in pool.layer(index):
            side[FULL].values[number] = torch.randn(2, 4, 8).bfloat16()
    return block(pool, BlockSlot(FULL, number))


@pytest.mark.parametrize(("dtype", "bits"), [("auto", 16), ("int8", 8), ("int4", 4)])
def test_pages_take_what_their_values_and_scales_take(dtype: str, bits: int) -> None:
    pool, layout = make(dtype=dtype), KVLayout.of(MODEL, 4, torch.bfloat16, dtype)
    per_token_and_head = 8 * bits // 8 + {"auto": 2 * 2, "int8": 2, "int4": 4}[dtype]
    assert layout.page_bytes == MODEL.num_layers * 2 * 2 * 4 * per_token_and_head
    assert pool.num_bytes == (12 + 5) * layout.page_bytes
    for typed in pool.layer(0)[0].values():
        assert typed.values.untyped_storage().nbytes() == 12 * layout.page_bytes


def test_the_pool_never_takes_more_than_the_knob_says() -> None:
    for dtype in ("auto", "int8", "int4"):
        knobs = {"kv_cache_bytes": 17_000_000, "kv_swap_bytes": 16 * 1024**2, "kv_cache_dtype": dtype}
        cache = KVCache.allocate(MODEL, torch.bfloat16, CATALOGUE.configuration(knobs))
        page = cache.pool.layout.page_bytes
        assert 17_000_000 + 16 * 1024**2 - 2 * page < cache.pool.num_bytes <= 17_000_000 + 16 * 1024**2


def test_a_pool_smaller_than_a_page_is_refused_by_name() -> None:
    big = ModelConfig(100, 32, 64, 64, 64, 512, 64, 512, 1e-5, 10000.0, tied_head=True)
    knobs = {"kv_cache_bytes": 16 * 1024**2, "block_size": 128}
    with pytest.raises(KnobError, match="kv_cache_bytes: 16777216 is less than a page"):
        KVCache.allocate(big, torch.bfloat16, CATALOGUE.configuration(knobs))


def test_compressing_keeps_the_content_as_int8_means_it_and_touches_nothing_else() -> None:
    torch.manual_seed(0)
    pool = make()
    contents = [fill(pool, number) for number in range(4)]
    slots = [BlockSlot(INT8, 8), BlockSlot(INT8, 9)]
    pool.carry_out([Move(MoveKind.COPY, BlockSlot(FULL, n), slots[n]) for n in range(2)])
    for number, slot in enumerate(slots):
        expected = dequantize(*quantize(contents[number].bfloat16(), INT8), torch.float32)
        assert torch.equal(block(pool, slot), expected)
        assert (expected - contents[number]).abs().max() < 0.02 * contents[number].abs().max()
    for number in (2, 3):
        assert torch.equal(block(pool, BlockSlot(FULL, number)), contents[number])


def test_moves_that_follow_each_other_are_carried_out_in_order() -> None:
    torch.manual_seed(0)
    pool = make()
    first, second = fill(pool, 0), fill(pool, 1)
    full = [BlockSlot(FULL, n) for n in range(12)]
    pool.carry_out(
        [
            Move(MoveKind.COPY, full[0], full[2]),
            Move(MoveKind.COPY, full[2], full[3]),  # reads what was just written
            Move(MoveKind.COPY, full[1], full[0]),  # writes what was read before
        ]
    )
    assert torch.equal(block(pool, full[3]), first)
    assert torch.equal(block(pool, full[0]), second)


@pytest.mark.parametrize("in_file", [False, True])
def test_what_is_swapped_out_comes_back_bit_by_bit(tmp_path: Path, in_file: bool) -> None:
    torch.manual_seed(0)
    path = tmp_path / "swap"
    pool = make(swap_file=path if in_file else None)
    contents = [fill(pool, number) for number in range(3)]
    small = BlockSlot(INT8, 7)
    pool.carry_out([Move(MoveKind.COPY, BlockSlot(FULL, 2), small)])
    compressed = block(pool, small)
    out = [
        (BlockSlot(FULL, 0), BlockSlot(FULL, 4)),
        (BlockSlot(FULL, 1), BlockSlot(FULL, 1)),
        (small, BlockSlot(INT8, 1)),
    ]
    pool.carry_out([Move(MoveKind.SWAP_OUT, source, place) for source, place in out])
    for number in range(12):
        fill(pool, number)
    back = [BlockSlot(FULL, 9), BlockSlot(FULL, 5), BlockSlot(INT8, 2)]
    pool.carry_out([Move(MoveKind.SWAP_IN, place, slot) for (_, place), slot in zip(out, back, strict=True)])
    for slot, content in zip(back, [*contents[:2], compressed], strict=True):
        assert torch.equal(block(pool, slot), content)
    assert not path.exists()  # its name is gone, so that no end of the process leaves it behind


def test_a_swap_file_never_overwrites_one_that_exists(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("keep me")
    with pytest.raises(FileExistsError):
        make(swap_file=path)
    assert path.read_text() == "keep me"
