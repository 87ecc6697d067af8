"""Layers of a session hand out restored bytes or raise, whether a pass, a caller or a copy reads them first."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.together import transformers_families as fam

from hicache_controller.integrations.transformers.layers import FullLayer, HybridLayer, IndexedLayer, WindowLayer
from hicache_controller.integrations.transformers.model_layout import AttentionShape, RowShape, StateShape, StatesShape

pytestmark = pytest.mark.usefixtures("one_thread")
PREFIX = 4 * fam.PAGE


@pytest.fixture(autouse=True)
def _memory_is_not_a_number() -> Iterator[None]:
    """Fresh memory holds NaN, so that nothing can be right by accident."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def tensors(layer: Any) -> dict[str, torch.Tensor]:
    """Everything a layer keeps, by name."""
    found: dict[str, torch.Tensor] = {}
    for name in ("keys", "values", "indexer_keys"):
        if isinstance(kept := getattr(layer, name, None), torch.Tensor):
            found[name] = kept
    for name in ("conv_states", "recurrent_states"):
        for number, kept in getattr(layer, name, {}).items():
            if kept is not None:
                found[f"{name} {number}"] = kept
    return found


def check_equal(layers: list[Any], expected: list[Any]) -> None:
    """Check that layers keep the same bits."""
    for layer, reference in zip(layers, expected, strict=True):
        got, right = tensors(layer), tensors(reference)
        assert got.keys() == right.keys()
        for name, tensor in got.items():
            # A static layer has room after its tokens.
            assert torch.equal(tensor[..., : right[name].shape[-2], :], right[name]), name


@pytest.mark.parametrize("model", fam.FAMILIES, indirect=True)
def test_what_is_read_before_the_first_pass_is_what_was_restored(model: Any) -> None:
    prompt = fam.random_tokens(PREFIX + 8)
    with fam.open_cache(model) as cache:
        fam.keep(cache, prompt, PREFIX)
        fam.evict(cache)
        with cache.session(prompt, checkpoints=()) as past:
            assert past.cached_tokens == PREFIX
            check_equal(past.layers, fam.compute_prefix(model, prompt[:, :PREFIX]).kept.layers)
        fam.check(cache)


@pytest.mark.parametrize("model", fam.FAMILIES, indirect=True)
def test_a_copy_goes_its_own_way_and_the_session_keeps_only_its_own(model: Any) -> None:
    prompt, other = fam.random_tokens(PREFIX + 2 * fam.PAGE), fam.random_tokens(2 * fam.PAGE)
    prefix = fam.compute_prefix(model, prompt[:, :PREFIX])
    expected = fam.forward(model, prompt[:, PREFIX:], prefix.cache())
    with fam.open_cache(model) as cache:
        fam.keep(cache, prompt[:, : PREFIX + 1], PREFIX)
        fam.evict(cache)
        with cache.session(prompt, checkpoints=[PREFIX + fam.PAGE]) as past:
            first = int(past.get_seq_length())
            twin = copy.deepcopy(past)
            assert twin.get_seq_length() == first
            reference = fam.compute_prefix(model, prompt[:, :first]).cache()
            for at in range(first - PREFIX, 2 * fam.PAGE):
                step, expected_step = (fam.forward(model, other[:, at : at + 1], each) for each in (twin, reference))
                torch.testing.assert_close(step, expected_step, atol=1e-3, rtol=1e-3)
            rest = fam.forward(model, prompt[:, first:], past)
            torch.testing.assert_close(rest, expected[:, first - PREFIX :], atol=1e-3, rtol=1e-3)
        fam.evict(cache)
        with cache.session(prompt, checkpoints=()) as past:
            assert past.cached_tokens == PREFIX + fam.PAGE
            kept = fam.forward(model, prompt[:, -fam.PAGE :], past)
            torch.testing.assert_close(kept, expected[:, -fam.PAGE :], atol=1e-3, rtol=1e-3)
        fam.check(cache)


@pytest.mark.parametrize("model", ["llama", "mistral", "falcon_h1", "deepseek_v32"], indirect=True)
def test_a_copy_that_outlives_the_session_raises_or_is_right(model: Any) -> None:
    prompt = fam.random_tokens(PREFIX + 8)
    prefix = fam.compute_prefix(model, prompt[:, :PREFIX])
    with fam.open_cache(model) as cache:
        fam.keep(cache, prompt, PREFIX)
        with contextlib.suppress(fam.LeftError), cache.session(prompt, checkpoints=()) as past:
            filled, unfilled = copy.deepcopy(past), copy.deepcopy(past)
            for layer in filled.layers:
                layer.fill()
            raise fam.LeftError
        fam.evict(cache)
        check_equal(filled.layers, prefix.kept.layers)
        for late in (unfilled, past, copy.deepcopy(past)):
            for layer in late.layers:
                with pytest.raises(RuntimeError, match="the session is over"):
                    tensors(layer)
            with pytest.raises(RuntimeError, match="the session is over"):
                fam.forward(model, prompt[:, PREFIX:], late)


def test_static_layers_and_their_copies_are_filled_when_read() -> None:
    model = fam.make_model("qwen3", seed=2)
    prompt = fam.random_tokens(PREFIX + 8)
    prefix = fam.compute_prefix(model, prompt[:, :PREFIX])
    with fam.open_cache(model) as cache:
        fam.keep(cache, prompt, PREFIX)
        with cache.session(prompt, max_cache_len=64) as past:
            twin = copy.deepcopy(past)
            check_equal(past.layers, prefix.kept.layers)
            check_equal(twin.layers, prefix.kept.layers)


class TestLengthsWaitForNothing:
    """A layer's length and mask sizes are asked for before its load is there; they must not fill it."""

    def check(self, layer: Any, filled: list[Any]) -> None:
        assert layer.get_seq_length() == 7
        assert layer.get_mask_sizes(2)[0] == 9
        assert layer.is_initialized
        twin = copy.deepcopy(layer)
        assert not filled
        assert twin.keys is not None
        assert filled == [twin]
        assert layer.values is not None
        assert filled == [twin, layer]
        assert layer.get_seq_length() == 7

    @pytest.mark.parametrize("kind", [FullLayer, IndexedLayer, HybridLayer, WindowLayer])
    def test_in_every_kind_of_layer(self, kind: Any) -> None:
        layer: Any = kind(sliding_window=20) if kind is WindowLayer else kind()
        row = RowShape(2, 4, torch.float32)
        shape = AttentionShape(row, row, RowShape(1, 4, torch.float32) if isinstance(layer, IndexedLayer) else None)
        filled: list[Any] = []
        held = [7] if isinstance(layer, WindowLayer) else []
        device = torch.device("cpu")
        layer.begin(shape, 1, 7, *held, device, filled.append)
        if isinstance(layer, HybridLayer):
            state = StateShape((3, 4), torch.float32)
            layer.begin_states(StatesShape(((0, state),), ((0, state),)), 1, device, filled.append)
        self.check(layer, filled)
