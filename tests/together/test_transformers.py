"""The prefix cache of transformers: what is restored equals what never left the device, bit for bit."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import GenerationConfig
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicLayer, DynamicSlidingWindowLayer

from hicache_controller import Namespace
from hicache_controller.integrations.transformers import HiCache, Hit, UnsupportedError, _requirements, matching
from hicache_controller.integrations.transformers.layers import FullLayer, WindowLayer
from hicache_controller.integrations.transformers.rows import copy_rows


def _families() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "transformers_families", Path(__file__).with_name("transformers_families.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


fam = _families()
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
PREFIX = 8 * fam.PAGE


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {}


@pytest.fixture
def model(request: pytest.FixtureRequest, models: dict[str, Any]) -> Any:
    family = request.param
    if family not in models:
        models[family] = fam.make_model(family, seed=1)
    return models[family]


class LeftError(Exception):
    """Leaves a session without keeping anything."""


def open_cache(model: Any, **options: Any) -> HiCache:
    return HiCache.for_model(model, model_id="tiny", l2_gb=0.02, page_size=fam.PAGE, **options)


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts that share a prefix of whole pages and three tokens more."""
    shared = fam.random_tokens(PREFIX + 3)
    first, second = fam.random_tokens(9), fam.random_tokens(10)
    second[0, 0] = first[0, 0] % (fam.VOCABULARY - 1) + 1
    return torch.cat([shared, first], 1), torch.cat([shared, second], 1)


@pytest.mark.parametrize("model", fam.FAMILIES, indirect=True)
def test_continuing_from_every_tier_equals_continuing_from_the_device_cache(model: Any, tmp_path: Path) -> None:
    first, second = prompts()
    prefix = fam.compute_prefix(model, first[:, :PREFIX])
    tokens, logits = fam.continuation(model, second[:, PREFIX:], prefix.cache())

    def check_continuation(cache: HiCache, tier: str) -> None:
        # What is left with an error keeps nothing, so the next tier's hit is the same.
        with contextlib.suppress(LeftError), cache.session(second, checkpoints=()) as past:
            assert past.get_seq_length() == past.cached_tokens == PREFIX
            assert past.hits[0].tokens == getattr(past.hits[0], tier) == PREFIX
            chosen, seen = fam.continuation(model, second[:, PREFIX:], past)
            assert chosen == tokens
            assert all(torch.equal(a, b) for a, b in zip(seen, logits, strict=True))
            raise LeftError
        fam.check(cache)

    with open_cache(model, storage=tmp_path) as cache:
        fam.keep(cache, first, PREFIX)
        check_continuation(cache, "device")
        fam.evict(cache)
        check_continuation(cache, "host")
    with open_cache(model, storage=tmp_path) as cache:
        check_continuation(cache, "storage")


@pytest.mark.parametrize("model", fam.FAMILIES, indirect=True)
def test_the_next_turn_of_a_chat_computes_only_what_is_new(model: Any) -> None:
    question = fam.random_tokens(29)
    with open_cache(model) as cache:
        with cache.session(question) as past:
            answer = model.generate(question, past_key_values=past, max_new_tokens=15, do_sample=False)
        assert torch.equal(answer, model.generate(question, max_new_tokens=15, do_sample=False))
        following = torch.cat([answer, fam.random_tokens(6)], 1)
        with cache.session(following, checkpoints=()) as past:
            # The last token was chosen and never run, so 43 tokens have keys: five pages.
            assert past.cached_tokens == 40
            fam.forward(model, following[:, 40:], past)
        fam.check(cache)


def test_a_killed_process_leaves_a_warm_storage_and_nothing_wrong(tmp_path: Path, models: dict[str, Any]) -> None:
    families = ("llama", "gemma3", "qwen3_next")
    first, second = prompts()
    torch.save(first, tmp_path / "prompt")
    # The second prompt of each model is killed while it is on its way.
    script = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch, transformers_families as fam
from hicache_controller.integrations.transformers import HiCache
prompt = torch.load({str(tmp_path / "prompt")!r})
for family in {families!r}:
    model = fam.make_model(family, seed=1)
    cache = HiCache.for_model(
        model, model_id=family, l2_gb=0.02, page_size=fam.PAGE, storage={str(tmp_path / "pages")!r}
    )
    fam.keep(cache, prompt, {PREFIX})
    cache.flush()
    fam.keep(cache, fam.random_tokens(300), 296)
os.kill(os.getpid(), signal.SIGKILL)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, timeout=300)
    assert result.returncode == -signal.SIGKILL, result.stderr.decode()
    for family in families:
        model = models.setdefault(family, fam.make_model(family, seed=1))
        prefix = fam.compute_prefix(model, first[:, :PREFIX])
        tokens, logits = fam.continuation(model, second[:, PREFIX:], prefix.cache())
        options = {"model_id": family, "l2_gb": 0.02, "page_size": fam.PAGE, "storage": tmp_path / "pages"}
        with HiCache.for_model(model, **options) as cache, cache.session(second, checkpoints=()) as past:
            assert past.hits[0].storage == past.cached_tokens == PREFIX
            chosen, seen = fam.continuation(model, second[:, PREFIX:], past)
        assert chosen == tokens
        assert all(torch.equal(a, b) for a, b in zip(seen, logits, strict=True))


@pytest.mark.parametrize("change", ["weight", "buffer", "dtype", "revision", "model_id", "configuration", "page_size"])
def test_what_changes_the_keys_makes_every_stored_page_a_miss(change: str, tmp_path: Path) -> None:
    prompt = fam.random_tokens(40)
    options: dict[str, Any] = {"model_id": "tiny", "revision": "a", "page_size": fam.PAGE}

    def hit(model: Any, options: dict[str, Any]) -> int:
        with HiCache.for_model(model, l2_gb=0.02, storage=tmp_path, **options) as cache:
            with cache.session(prompt) as past:
                found = past.cached_tokens
                fam.forward(model, prompt[:, found:], past)
            cache.flush()
        return found

    model = fam.make_model("llama", seed=5)
    assert hit(model, options) == 0
    assert hit(fam.make_model("llama", seed=5), options) == 32
    other = fam.make_model("llama", seed=5)
    with torch.no_grad():
        if change == "weight":
            other.model.layers[2].self_attn.k_proj.weight[3, 5] += 1e-6
        elif change == "buffer":
            other.model.rotary_emb.inv_freq[1] *= 1.0001
        elif change == "dtype":
            other = other.to(torch.bfloat16)
        elif change == "configuration":
            other.config.rms_norm_eps *= 2
    changed = {"revision": {"revision": "b"}, "model_id": {"model_id": "huge"}, "page_size": {"page_size": 4}}
    assert hit(other, options | changed.get(change, {})) == 0
    assert hit(model, options) == 32


def test_a_batch_with_different_prefixes_continues_from_the_column_all_reach() -> None:
    model = fam.make_model("llama", seed=3)
    short, long = fam.random_tokens(45), fam.random_tokens(61)
    ids = torch.cat([torch.nn.functional.pad(short, (16, 0)), long])
    mask = torch.ones_like(ids)
    mask[0, :16] = 0
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    with open_cache(model) as cache:
        for prompt in (short[:, :30], long):
            with cache.session(prompt) as past:
                fam.forward(model, prompt, past)
        with cache.session(ids, attention_mask=mask) as past:
            # 24 tokens of the short prompt and 56 of the long one; columns count 16 of padding.
            assert past.cached_tokens == 16 + 24
            assert [hit.tokens for hit in past.hits] == [24, 40]
            output = model.generate(ids, attention_mask=mask, past_key_values=past, max_new_tokens=8, do_sample=False)
        assert torch.equal(output, expected)
        fam.check(cache)
        with cache.session(output[:1, 16:]) as past:
            assert past.cached_tokens == 48
            fam.forward(model, output[:1, 64:], past)


def test_a_batch_cut_inside_a_page_restores_the_same_bits() -> None:
    model = fam.make_model("llama", seed=3)
    short, long = fam.random_tokens(45), fam.random_tokens(58)
    ids = torch.cat([torch.nn.functional.pad(short, (13, 0)), long])
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    with open_cache(model) as cache:
        for prompt in (short, long):
            with cache.session(prompt) as past:
                fam.forward(model, prompt, past)
                kept = past.layers[1].keys.clone()
            if prompt is short:
                first = kept
        with cache.session(ids, attention_mask=mask) as past:
            assert past.cached_tokens == 13 + 40
            assert [hit.tokens for hit in past.hits] == [40, 53]
            for layer in past.layers:
                layer.fill()
            assert torch.equal(past.layers[1].keys[0, :, 13:], first[0, :, :40])
            assert torch.equal(past.layers[1].keys[1], kept[0, :, :53])
            assert not past.layers[1].keys[0, :, :13].any()


@pytest.mark.parametrize("model", ["gemma3", "falcon_h1", "qwen3_next"], indirect=True)
def test_a_batch_of_windows_and_states_continues_where_every_sequence_can(model: Any) -> None:
    ids = fam.random_tokens(40, batch=2)
    mask = torch.ones_like(ids)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    with open_cache(model) as cache:
        for row in ids:
            with cache.session(row[None], checkpoints=[16, 32]) as past:
                fam.forward(model, row[None, past.get_seq_length() :], past)
        with cache.session(ids[:1, :25], checkpoints=[24]) as past:
            fam.forward(model, ids[:1, past.get_seq_length() : 25], past)
        # The windows saved at 16 and 32 make up the one at 24; states do not.
        cut = 24 if type(model).__name__.startswith("Gemma") else 16
        for prompts, reached in ((ids, 32), (ids[:, :25], cut)):
            with cache.session(prompts, checkpoints=()) as past:
                assert past.cached_tokens == reached
                output = model.generate(prompts, past_key_values=past, max_new_tokens=4, do_sample=False)
            if prompts is ids:
                assert torch.equal(output, expected)
        longer = fam.random_tokens(43)
        with cache.session(longer, checkpoints=[16, 32]) as past:
            fam.forward(model, longer[:, past.get_seq_length() :], past)
        both = torch.cat([torch.nn.functional.pad(ids[:1], (3, 0)), longer])
        shown = torch.ones_like(both)
        shown[0, :3] = 0
        with cache.session(both, attention_mask=shown, checkpoints=()) as past:
            assert past.cached_tokens == 0
            model.generate(both, attention_mask=shown, past_key_values=past, max_new_tokens=2, do_sample=False)
        fam.check(cache)


@pytest.mark.parametrize("model", ["llama", "mistral", "falcon_h1", "deepseek_v32"], indirect=True)
def test_leaving_with_an_error_keeps_nothing_and_gives_every_page_back(model: Any) -> None:
    prompt = fam.random_tokens(50)
    with open_cache(model) as cache:
        free = cache.tiers.tree.device_allocator.available_pages
        with contextlib.suppress(LeftError), cache.session(prompt) as past:
            model.generate(prompt, past_key_values=past, max_new_tokens=10, do_sample=False)
            raise LeftError
        assert cache.stats().device_tokens == cache.stats().host_tokens == 0
        assert cache.tiers.tree.device_allocator.available_pages == free
        for name, _ in cache.tiers.windowed_pools:
            assert cache.tiers.tree.window_stats(name) == (0, 0)
            entry = cache.tiers.group.get_entry(name)
            everything = entry.device_alloc_fn(entry.device_pool.size)
            assert everything is not None
            entry.device_free_fn(everything)
        assert not model.get_decoder()._forward_pre_hooks


def test_a_long_prefix_comes_from_storage_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page_bytes = 2 * 2 * 8 * 4 * 3 * fam.PAGE
    monkeypatch.setattr(matching, "STORAGE_STEP_BYTES", 3 * page_bytes)
    model = fam.make_model("llama", seed=10)
    prompt = fam.random_tokens(11 * fam.PAGE + 4)
    prefix = fam.compute_prefix(model, prompt[:, : 11 * fam.PAGE])
    expected = fam.continuation(model, prompt[:, 11 * fam.PAGE :], prefix.cache())
    with open_cache(model, storage=tmp_path) as cache:
        fam.keep(cache, prompt[:, : 2 * fam.PAGE + 1], 2 * fam.PAGE)
    with open_cache(model, storage=tmp_path) as cache:
        fam.keep(cache, prompt, 11 * fam.PAGE)
    with open_cache(model, storage=tmp_path) as cache:
        with cache.session(prompt[:, : 2 * fam.PAGE + 1]) as past:
            fam.forward(model, prompt[:, 2 * fam.PAGE : 2 * fam.PAGE + 1], past)
        with cache.session(prompt) as past:
            assert past.hits[0] == Hit(11 * fam.PAGE, device=2 * fam.PAGE, storage=9 * fam.PAGE)
            chosen, seen = fam.continuation(model, prompt[:, 11 * fam.PAGE :], past)
        fam.check(cache)
    assert chosen == expected[0]
    for mine, its in zip(seen, expected[1], strict=True):
        torch.testing.assert_close(mine, its)


def test_namespaces_do_not_share_prefixes() -> None:
    model = fam.make_model("llama", seed=6)
    prompt = fam.random_tokens(33)
    with open_cache(model) as cache:
        for namespace, cached in (
            (Namespace(adapter="a"), 0),
            (Namespace(adapter="b"), 0),
            (Namespace(adapter="a"), 32),
        ):
            with cache.session(prompt, namespace=namespace) as past:
                assert past.cached_tokens == cached
                fam.forward(model, prompt[:, cached:], past)


def test_a_prompt_longer_than_the_device_tier_is_cached_in_part() -> None:
    model = fam.make_model("llama", seed=7)
    page = 2 * 2 * 8 * 4 * 3 * fam.PAGE
    prompt = fam.random_tokens(100)
    expected = model.generate(prompt, max_new_tokens=4, do_sample=False)
    with HiCache.for_model(model, model_id="x", l1_gb=6.5 * page / 1e9, l2_gb=0.01, page_size=fam.PAGE) as cache:
        for cached in (0, 48, 48):
            with cache.session(prompt) as past:
                assert past.cached_tokens == cached
                output = model.generate(prompt, past_key_values=past, max_new_tokens=4, do_sample=False)
            assert torch.equal(output, expected)
            fam.check(cache)


def test_a_prompt_in_storage_that_is_longer_than_the_device_tier_is_loaded_in_part(tmp_path: Path) -> None:
    model = fam.make_model("llama", seed=7)
    page = 2 * 2 * 8 * 4 * 3 * fam.PAGE
    prompt = fam.random_tokens(100)
    with open_cache(model, storage=tmp_path) as cache:
        fam.keep(cache, prompt, 96)
    expected = model.generate(prompt, max_new_tokens=4, do_sample=False)
    with open_cache(model, storage=tmp_path, l1_gb=6.5 * page / 1e9) as cache, cache.session(prompt) as past:
        assert past.hits[0] == Hit(48, storage=48)
        output = model.generate(prompt, past_key_values=past, max_new_tokens=4, do_sample=False)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("model", ["llama", "gemma3", "mistral"], indirect=True)
def test_what_was_cropped_and_computed_otherwise_is_not_served(model: Any) -> None:
    prompt, other = fam.random_tokens(40), fam.random_tokens(20)
    with open_cache(model) as cache:
        with cache.session(prompt, checkpoints=[16, 32]) as past:
            fam.forward(model, prompt, past)
            past.crop(-16)
            fam.forward(model, other, past)
        turned = torch.cat([prompt[:, :24], other], 1)
        for tokens, cached in ((prompt[:, :36], 24), (turned[:, :38], 32), (turned, 40)):
            with contextlib.suppress(LeftError), cache.session(tokens, checkpoints=()) as past:
                # The window saved at 32 was that of the old tokens; what is served is the one saved at 40, cut.
                assert past.cached_tokens == cached
                logits = fam.forward(model, tokens[:, past.cached_tokens :], past)
                fresh = fam.forward(model, tokens, fam.DynamicCache(config=model.config))
                torch.testing.assert_close(logits, fresh[:, -logits.shape[1] :])
                raise LeftError
        fam.check(cache)


def test_prompt_lookup_decoding_crops_the_cache_and_keeps_the_right_tokens() -> None:
    model = fam.make_model("llama", seed=8)
    prompt = fam.random_tokens(12).repeat(1, 4)
    options = {"prompt_lookup_num_tokens": 4, "max_new_tokens": 24, "do_sample": False}
    expected = model.generate(prompt, **options)
    with open_cache(model) as cache:
        with cache.session(prompt) as past:
            assert torch.equal(model.generate(prompt, past_key_values=past, **options), expected)
        reference = fam.compute_prefix(model, expected[:, :-1]).kept.layers[2].keys
        with cache.session(expected) as past:
            assert past.cached_tokens == 64
            past.layers[2].fill()
            torch.testing.assert_close(past.layers[2].keys, reference[:, :, :64])
            fam.forward(model, expected[:, 64:], past)
        # transformers runs the whole prompt again, as if the cache were empty; that must not go unseen.
        with pytest.raises(ValueError, match="whole prompt"), cache.session(prompt) as past:
            model.generate(prompt, past_key_values=past, **options)


def test_a_static_cache_keeps_the_prompt_and_gives_the_same_tokens() -> None:
    model = fam.make_model("qwen3", seed=9)
    prompt = fam.random_tokens(45)
    expected = model.generate(prompt, max_new_tokens=9, do_sample=False)
    with open_cache(model) as cache:
        for tier in ("computed", "device", "host"):
            if tier == "host":
                fam.evict(cache)
            with cache.session(prompt, max_cache_len=64) as past:
                assert past.cached_tokens == (0 if tier == "computed" else 40)
                assert torch.equal(
                    model.generate(prompt, past_key_values=past, max_new_tokens=9, do_sample=False), expected
                )
            assert not model.get_decoder()._forward_pre_hooks
        assert cache.stats().host_tokens == 40
        with pytest.raises(ValueError, match="max_cache_len is 45"), cache.session(prompt, max_cache_len=45):
            pass


@pytest.mark.parametrize("model", ["llama", "gemma3", "falcon_h1", "deepseek_v32"], indirect=True)
def test_each_layer_is_waited_for_and_no_later_one(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = fam.random_tokens(37)
    ran = [threading.Event() for _ in range(3)]
    hooks = [
        layer.register_forward_hook(lambda *_, event=event: event.set())
        for layer, event in zip(model.get_decoder().layers, ran, strict=True)
    ]
    with open_cache(model) as cache:
        fam.keep(cache, prompt, 32)
        fam.evict(cache)
        in_time: list[bool] = []
        for entry in cache.tiers.group.entries:
            pool, mapper = entry.host_pool, entry.layer_mapper
            layers = {mapper(layer): layer for layer in range(3)}

            def load(
                *arguments: Any, inner: Any = pool.load_to_device_per_layer, layers: Any = layers, **more: Any
            ) -> Any:
                layer = layers[arguments[3]]
                if layer:
                    # The rows of a layer arrive only once the layer before it has run without them.
                    in_time.append(ran[layer - 1].wait(timeout=30))
                return inner(*arguments, **more)

            monkeypatch.setattr(pool, "load_to_device_per_layer", load)
        for event in ran:
            event.clear()
        expected = fam.forward(model, prompt[:, 32:], fam.compute_prefix(model, prompt[:, :32]).cache())
        for event in ran:
            event.clear()
        with cache.session(prompt) as past:
            assert past.hits[0].host == 32
            assert torch.equal(fam.forward(model, prompt[:, 32:], past), expected)
        assert in_time
        assert all(in_time)
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("model", ["llama", "gemma3", "deepseek_v32", "falcon_h1"], indirect=True)
def test_a_session_may_go_in_and_out_of_inference_mode(model: Any) -> None:
    prompt = fam.random_tokens(45)
    with open_cache(model) as cache:
        for cached in (0, 40):
            with torch.inference_mode(), cache.session(prompt) as past:
                assert past.cached_tokens == cached
                first = int(past.get_seq_length())
                fam.forward(model, prompt[:, first:], past)
            fam.evict(cache)
        with cache.session(prompt) as past:
            with torch.inference_mode():
                fam.forward(model, prompt[:, 40:44], past)
            fam.forward(model, prompt[:, 44:], past)
        fam.check(cache)


@pytest.mark.parametrize(
    ("version", "accepted"), [("5.13.2", False), ("5.14.0", True), ("5.25.0.dev0", True), ("6.0", True)]
)
def test_a_version_of_transformers_that_is_too_old_is_named(version: str, accepted: bool) -> None:
    if accepted:
        _requirements.check_version(version)
    else:
        with pytest.raises(ImportError, match=r"transformers is 5\.13\.2; the prefix cache needs 5\.14 or newer"):
            _requirements.check_version(version)


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


class TestWhatASessionRefuses:
    @pytest.fixture
    def cache(self, models: dict[str, Any]) -> Iterator[HiCache]:
        with open_cache(models.setdefault("llama", fam.make_model("llama", seed=1))) as cache:
            yield cache

    @pytest.mark.parametrize(
        "options",
        [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}, {"cache_implementation": "quantized"}],
        ids=str,
    )
    def test_generation_it_cannot_serve_is_named_on_entry(self, cache: HiCache, options: dict[str, Any]) -> None:
        config = GenerationConfig(**options)
        with pytest.raises(UnsupportedError, match=next(iter(options))):
            cache.session(fam.random_tokens(20), generation_config=config)

    def test_beams_that_nobody_told_of_are_refused_by_the_layers(self, cache: HiCache) -> None:
        prompt = fam.random_tokens(20)
        with cache.session(prompt) as past:
            fam.forward(cache.model, prompt, past)
        with pytest.raises(UnsupportedError, match="beam"), cache.session(prompt) as past:
            cache.model.generate(prompt, past_key_values=past, num_beams=2, max_new_tokens=3)
        fam.check(cache)

    def test_padding_that_is_not_on_the_left(self, cache: HiCache) -> None:
        prompt = fam.random_tokens(20)
        mask = torch.ones_like(prompt)
        mask[0, 15:] = 0
        with pytest.raises(UnsupportedError, match="padding on the left"), cache.session(prompt, attention_mask=mask):
            pass

    def test_the_whole_prompt_passed_again_to_a_forward_pass(self, cache: HiCache) -> None:
        prompt = fam.random_tokens(20)
        with cache.session(prompt) as past:
            fam.forward(cache.model, prompt, past)
        with pytest.raises(ValueError, match="whole prompt"), cache.session(prompt) as past:
            fam.forward(cache.model, prompt, past)

    def test_a_forward_pass_that_records_gradients(self, cache: HiCache) -> None:
        prompt = fam.random_tokens(20)
        with pytest.raises(UnsupportedError, match="gradients"), cache.session(prompt) as past:
            cache.model(input_ids=prompt, use_cache=True, **{cache.cache_argument: past})

    def test_a_model_in_training_mode(self) -> None:
        model = fam.make_model("llama", seed=1)
        with open_cache(model) as cache:
            model.train()
            with pytest.raises(RuntimeError, match="training"):
                cache.session(fam.random_tokens(20))

    @pytest.mark.parametrize("change", ["step", "dtype"])
    def test_weights_that_changed_under_it(self, change: str) -> None:
        model = fam.make_model("llama", seed=1)
        with open_cache(model) as cache:
            if change == "step":
                with torch.no_grad():
                    model.lm_head.weight.add_(1)
            else:
                model.half()
            with pytest.raises(RuntimeError, match="weights were changed"), cache.session(fam.random_tokens(20)):
                pass

    def test_a_static_cache_of_a_model_with_windows(self, models: dict[str, Any]) -> None:
        model = models.setdefault("mistral", fam.make_model("mistral", seed=1))
        with (
            open_cache(model) as cache,
            pytest.raises(UnsupportedError, match="full attention alone"),
            cache.session(fam.random_tokens(20), max_cache_len=64),
        ):
            pass

    def test_a_model_whose_layers_it_does_not_know(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class OwnLayer(DynamicLayer):
            pass

        monkeypatch.setitem(DYNAMIC_LAYER_TYPE_MAPPING, "full_attention", OwnLayer)
        with pytest.raises(UnsupportedError, match="layer 0 keeps its cache in a OwnLayer"):
            open_cache(fam.make_model("llama", seed=1))

    def test_a_tier_too_small_for_the_model(self) -> None:
        with pytest.raises(ValueError, match="l2_gb is 1e-07 GB"):
            HiCache.for_model(fam.make_model("llama", seed=1), model_id="x", l1_gb=0.01, l2_gb=1e-7, page_size=fam.PAGE)

    def test_a_closed_cache(self) -> None:
        cache = open_cache(fam.make_model("llama", seed=1))
        cache.close()
        cache.close()
        with pytest.raises(RuntimeError, match="closed"):
            cache.session(fam.random_tokens(20))


class TestUncachedWhereAllowed:
    def generate(self, cache: HiCache, prompt: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> None:
        expected = cache.model.generate(prompt, attention_mask=mask, max_new_tokens=4, do_sample=False, **options)
        config = GenerationConfig(**options) if options else None
        for _ in range(2):
            with cache.session(prompt, attention_mask=mask, generation_config=config) as past:
                assert past is None
                output = cache.model.generate(
                    prompt, attention_mask=mask, past_key_values=past, max_new_tokens=4, do_sample=False, **options
                )
            assert torch.equal(output, expected)

    def test_beams_generate_without_the_cache_and_say_so_once(self, caplog: pytest.LogCaptureFixture) -> None:
        with open_cache(fam.make_model("llama", seed=1), on_unsupported="uncached") as cache:
            self.generate(cache, fam.random_tokens(20), num_beams=2)
        assert [record.message for record in caplog.records if "num_beams" in record.message] == [
            record.message for record in caplog.records if record.name.startswith("hicache_controller")
        ]
        assert sum("num_beams" in record.message for record in caplog.records) == 1

    def test_unknown_layers_generate_without_the_cache(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        class OwnLayer(DynamicLayer):
            pass

        monkeypatch.setitem(DYNAMIC_LAYER_TYPE_MAPPING, "full_attention", OwnLayer)
        with open_cache(fam.make_model("llama", seed=1), on_unsupported="uncached") as cache:
            self.generate(cache, fam.random_tokens(20))
            with pytest.raises(UnsupportedError, match="OwnLayer"):
                _ = cache.tiers
        assert sum("OwnLayer" in record.message for record in caplog.records) == 1

    def test_padding_on_the_right_generates_without_the_cache(self) -> None:
        prompt = fam.random_tokens(20, batch=2)
        mask = torch.ones_like(prompt)
        mask[0, 18:] = 0
        with open_cache(fam.make_model("llama", seed=1), on_unsupported="uncached") as cache:
            self.generate(cache, prompt, mask)

    def test_another_word_is_refused(self) -> None:
        with pytest.raises(ValueError, match="on_unsupported is 'maybe'"):
            open_cache(fam.make_model("llama", seed=1), on_unsupported="maybe")


class TestKeysThatAreNotThoseOfTheTokens:
    """What was computed in another way than plain causal attention over the tokens is not kept, and logged once."""

    @pytest.fixture
    def cache(self, models: dict[str, Any]) -> Iterator[HiCache]:
        with open_cache(models.setdefault("llama", fam.make_model("llama", seed=1))) as cache:
            yield cache

    def check_nothing_kept(self, cache: HiCache, caplog: pytest.LogCaptureFixture, why: str) -> None:
        assert cache.stats().device_tokens == 0
        assert sum(why in record.message for record in caplog.records) == 1

    def test_embeddings_tell_no_tokens(self, cache: HiCache, caplog: pytest.LogCaptureFixture) -> None:
        prompt = fam.random_tokens(20)
        with cache.session(prompt) as past, torch.no_grad():
            embeddings = cache.model.get_input_embeddings()(prompt)
            cache.model(inputs_embeds=embeddings, use_cache=True, **{cache.cache_argument: past})
        self.check_nothing_kept(cache, caplog, "inputs_embeds")

    def test_other_positions(self, cache: HiCache, caplog: pytest.LogCaptureFixture) -> None:
        prompt = fam.random_tokens(20)
        with cache.session(prompt) as past:
            fam.forward(cache.model, prompt, past, position_ids=torch.arange(5, 25)[None])
        self.check_nothing_kept(cache, caplog, "position_ids")

    def test_another_mask(self, cache: HiCache, caplog: pytest.LogCaptureFixture) -> None:
        prompt = fam.random_tokens(20)
        mask = torch.ones_like(prompt)
        mask[0, 3] = 0
        with cache.session(prompt) as past:
            fam.forward(cache.model, prompt, past, attention_mask=mask, position_ids=torch.arange(20)[None])
        self.check_nothing_kept(cache, caplog, "attention_mask")

    def test_padding_without_positions_is_an_error(self, cache: HiCache) -> None:
        prompt = fam.random_tokens(20)
        mask = torch.ones_like(prompt)
        mask[0, :3] = 0
        with pytest.raises(ValueError, match="position_ids"), cache.session(prompt, attention_mask=mask) as past:
            fam.forward(cache.model, prompt, past, attention_mask=mask)

    def test_other_tokens_than_the_prompt_are_kept_under_what_they_are(self, cache: HiCache) -> None:
        prompt, other = fam.random_tokens(20), fam.random_tokens(20)
        with cache.session(prompt) as past:
            fam.forward(cache.model, other, past)
        for tokens, cached in ((prompt, 0), (other, 16)):
            with contextlib.suppress(LeftError), cache.session(tokens) as past:
                assert past.cached_tokens == cached
                raise LeftError

    def test_a_load_that_fails_stops_the_forward_pass(self, cache: HiCache, monkeypatch: pytest.MonkeyPatch) -> None:
        prompt = fam.random_tokens(40)
        with cache.session(prompt) as past:
            fam.forward(cache.model, prompt, past)
        fam.evict(cache)
        pool = cache.tiers.group.anchor_entry.host_pool

        def fail(*arguments: Any, **options: Any) -> None:
            raise OSError("injected")

        for name in ("load_to_device_per_layer", "load_to_device_all_layer"):
            monkeypatch.setattr(pool, name, fail)
        with pytest.raises(RuntimeError, match="injected"), cache.session(prompt) as past:
            fam.forward(cache.model, prompt[:, 32:], past)
        monkeypatch.undo()
        expected = fam.forward(cache.model, prompt[:, 32:], fam.compute_prefix(cache.model, prompt[:, :32]).cache())
        with cache.session(prompt) as past:
            assert past.cached_tokens == 32
            torch.testing.assert_close(fam.forward(cache.model, prompt[:, 32:], past), expected)
        fam.check(cache)
