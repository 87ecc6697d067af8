"""The layers that stand in for transformers' own, pass by pass, and the copies between them and pool pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hicache_controller.integrations.transformers import UnsupportedError
from hicache_controller.integrations.transformers.layers import LAYER_OF, FullLayer, StaticFullLayer, WindowLayer
from hicache_controller.integrations.transformers.rows import PageRows, copy_rows
from hicache_controller.integrations.transformers.weights import weights_hash


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("dim", [1, 4, 6, 8])
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_rows_are_copied_exactly_whatever_their_place(dtype: torch.dtype, dim: int, offset: int) -> None:
    source = torch.randint(0, 100, (offset + 7 * 3 * dim,)).to(dtype)[offset:].view(7, 3, dim)
    target = torch.zeros(3, 9, dim, dtype=dtype)
    copy_rows(target[:, 1:8], source.transpose(0, 1))
    assert torch.equal(target[:, 1:8], source.transpose(0, 1))
    assert not target[:, 0].any()
    assert not target[:, 8].any()


@pytest.mark.parametrize("pages", [[3, 4, 5], [5, 3, 9], [7], []], ids=str)
def test_pages_are_read_and_written_where_they_are(pages: list[int]) -> None:
    pool = torch.randn(40, 2, 3)
    before = pool.clone()
    rows = PageRows(np.array(pages, np.int64), 4, torch.device("cpu"))
    slots = [page * 4 + slot for page in pages for slot in range(4)]
    assert len(rows) == len(slots)
    assert torch.equal(rows.read(pool), pool[slots])
    new = torch.randn(len(slots), 2, 3)
    rows.write(pool, new)
    before[slots] = new
    assert torch.equal(pool, before)


def test_the_hash_of_weights_follows_names_and_bits_and_no_order() -> None:
    def model(order: list[str], *, changed: bool = False) -> torch.nn.Module:
        made = torch.nn.Module()
        for name in order:
            value = torch.arange(len(name) * 3, dtype=torch.float32)
            made.register_buffer(name, value + changed * (name == "b") * 2.0**-20)
        return made

    first = weights_hash(model(["a", "b", "ccc"]))
    assert weights_hash(model(["ccc", "a", "b"])) == first
    assert weights_hash(model(["a", "b", "ccc"], changed=True)) != first
    assert weights_hash(model(["a", "b", "ddd"])) != first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_any_changed_value_changes_the_hash(dtype: torch.dtype) -> None:
    module = torch.nn.Module()
    values = torch.randint(0, 2, (37,)).to(dtype)
    module.register_buffer("values", values)
    seen = {weights_hash(module)}
    for place in range(37):
        values[place] = 1 - values[place].to(torch.int64)  # small equal steps, which weak sums let cancel
        seen.add(weights_hash(module))
    assert len(seen) == 38


@pytest.mark.parametrize("kind", [*LAYER_OF.values(), StaticFullLayer], ids=lambda kind: kind.__name__)
def test_no_layer_lets_sequences_move_within_the_batch(kind: type) -> None:
    options = {"sliding_window": 4} if "Window" in kind.__name__ else {}
    layer: Any = kind(**options, **{"max_cache_len": 8} if kind is StaticFullLayer else {})
    for refused in (layer.reorder_cache, layer.batch_repeat_interleave, layer.batch_select_indices):
        with pytest.raises(UnsupportedError, match="without beams"):
            refused(torch.tensor([0]))


class TestLayersAgainstTransformersOwn:
    """Random passes through a layer and through the one it stands in for give the same bits."""

    def states(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(2, 3, tokens, 4), torch.randn(2, 3, tokens, 5)

    @pytest.mark.parametrize("window", [2, 5, 64, 300])
    def test_windows_of_passes_of_every_size(self, window: int) -> None:
        mine, its = WindowLayer(sliding_window=window), DynamicSlidingWindowLayer(sliding_window=window)
        mine.retained = window - 1 + 8
        sizes = [1, 3, 1, 1, 40, 255, 1, 2, 300, 1, 7, 600, *[1] * 30, 250, 1]
        for size in sizes:
            keys, values = self.states(size)
            assert mine.get_mask_sizes(size) == its.get_mask_sizes(size)
            for got, expected in zip(mine.update(keys, values), its.update(keys, values), strict=True):
                assert torch.equal(got, expected)
            assert torch.equal(mine.keys, its.keys)
            assert torch.equal(mine.values, its.values)
            assert mine.get_seq_length() == its.get_seq_length()
            held = mine.held()[0]
            assert held.shape[2] >= min(its.get_seq_length(), window - 1 + 8)
            assert mine.first_held == its.get_seq_length() - held.shape[2]

    def test_full_attention_of_passes_and_crops_of_every_size(self) -> None:
        mine, its = FullLayer(), DynamicLayer()
        for size in [5, 1, 300, 1, 1, 900, 2]:
            keys, values = self.states(size)
            for got, expected in zip(mine.update(keys, values), its.update(keys, values), strict=True):
                assert torch.equal(got, expected)
            for layer in (mine, its):
                layer.crop(-(size // 2))
            assert torch.equal(mine.keys, its.keys)
            assert torch.equal(mine.values, its.values)

    def test_a_window_that_is_gone_cannot_be_cropped_back_to(self) -> None:
        layer = WindowLayer(sliding_window=5)
        layer.retained = 12
        layer.update(*self.states(400))
        layer.crop(-8)
        assert layer.get_seq_length() == 392
        with pytest.raises(RuntimeError, match="crop removes 1 tokens"):
            layer.crop(-1)

    def test_replaced_keys_are_continued_from(self) -> None:
        layer = FullLayer()
        layer.update(*self.states(6))
        kept = torch.randn(2, 3, 6, 4), torch.randn(2, 3, 6, 5)
        layer.keys, layer.values = kept
        new = self.states(2)
        for got, before, after in zip(layer.update(*new), kept, new, strict=True):
            assert torch.equal(got, torch.cat((before, after), -2))
