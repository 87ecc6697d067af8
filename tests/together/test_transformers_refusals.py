"""What the prefix cache of transformers refuses, what it generates without, and what it does not keep."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.together import transformers_families as fam
from transformers import GenerationConfig
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicLayer

from hicache_controller.hybrid import HybridCacheController
from hicache_controller.integrations.transformers import HiCache, UnsupportedError, _requirements
from hicache_controller.integrations.transformers import cache as cache_module
from hicache_controller.integrations.transformers import tiers as tiers_module
from hicache_controller.integrations.transformers.identity import model_fingerprint
from hicache_controller.storage import Fingerprint
from hicache_controller.storage.file import FileStorage

pytestmark = [
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.mark.parametrize(
    ("version", "accepted"), [("5.13.2", False), ("5.14.0", True), ("5.25.0.dev0", True), ("6.0", True)]
)
def test_a_version_of_transformers_that_is_too_old_is_named(version: str, accepted: bool) -> None:
    if accepted:
        _requirements.check_version(version)
    else:
        with pytest.raises(ImportError, match=r"transformers is 5\.13\.2; the prefix cache needs 5\.14 or newer"):
            _requirements.check_version(version)


class TestWhatASessionRefuses:
    @pytest.fixture
    def cache(self, models: dict[str, Any]) -> Iterator[HiCache]:
        with fam.open_cache(models.setdefault("llama", fam.make_model("llama", seed=1))) as cache:
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

    def test_beams_that_were_not_announced_are_refused_by_the_layers(self, cache: HiCache) -> None:
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
        with fam.open_cache(model) as cache:
            model.train()
            with pytest.raises(RuntimeError, match="training"):
                cache.session(fam.random_tokens(20))

    @pytest.mark.parametrize("change", ["step", "dtype"])
    def test_weights_that_changed_under_it(self, change: str) -> None:
        model = fam.make_model("llama", seed=1)
        with fam.open_cache(model) as cache:
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
            fam.open_cache(model) as cache,
            pytest.raises(UnsupportedError, match="full attention alone"),
            cache.session(fam.random_tokens(20), max_cache_len=64),
        ):
            pass

    def test_a_model_whose_layers_it_does_not_know(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class OwnLayer(DynamicLayer):
            pass

        monkeypatch.setitem(DYNAMIC_LAYER_TYPE_MAPPING, "full_attention", OwnLayer)
        with pytest.raises(UnsupportedError, match="layer 0 keeps its cache in a OwnLayer"):
            fam.open_cache(fam.make_model("llama", seed=1))

    @pytest.mark.parametrize("kind", ["dynamic", "longrope"])
    def test_rotations_that_depend_on_the_length(self, kind: str) -> None:
        model = fam.make_model("gemma3", seed=1)
        model.config.rope_parameters["full_attention"]["rope_type"] = kind
        with pytest.raises(UnsupportedError, match=f"rope_type is '{kind}'"):
            fam.open_cache(model)

    def test_a_model_with_an_encoder(self) -> None:
        model = fam.make_model("llama", seed=1)
        model.config.is_encoder_decoder = True
        with pytest.raises(UnsupportedError, match="encoder"):
            fam.open_cache(model)

    def test_a_tier_too_small_for_the_model(self) -> None:
        with pytest.raises(ValueError, match="l2_gb is 1e-07 GB"):
            HiCache.for_model(fam.make_model("llama", seed=1), model_id="x", l1_gb=0.01, l2_gb=1e-7, page_size=fam.PAGE)

    def test_a_closed_cache(self) -> None:
        cache = fam.open_cache(fam.make_model("llama", seed=1))
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
        with fam.open_cache(fam.make_model("llama", seed=1), on_unsupported="uncached") as cache:
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
        with fam.open_cache(fam.make_model("llama", seed=1), on_unsupported="uncached") as cache:
            self.generate(cache, fam.random_tokens(20))
            with pytest.raises(UnsupportedError, match="OwnLayer"):
                _ = cache.tiers
        assert sum("OwnLayer" in record.message for record in caplog.records) == 1

    def test_padding_on_the_right_generates_without_the_cache(self) -> None:
        prompt = fam.random_tokens(20, batch=2)
        mask = torch.ones_like(prompt)
        mask[0, 18:] = 0
        with fam.open_cache(fam.make_model("llama", seed=1), on_unsupported="uncached") as cache:
            self.generate(cache, prompt, mask)

    def test_another_word_is_refused(self) -> None:
        with pytest.raises(ValueError, match="on_unsupported is 'maybe'"):
            fam.open_cache(fam.make_model("llama", seed=1), on_unsupported="maybe")


class TestKeysThatAreNotThoseOfTheTokens:
    """What was computed in another way than plain causal attention over the tokens is not kept, and logged once."""

    @pytest.fixture
    def cache(self, models: dict[str, Any]) -> Iterator[HiCache]:
        with fam.open_cache(models.setdefault("llama", fam.make_model("llama", seed=1))) as cache:
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

    @pytest.mark.parametrize("at", ["in the prompt", "in the last step"])
    def test_another_mask_among_steps(self, cache: HiCache, caplog: pytest.LogCaptureFixture, at: str) -> None:
        tokens = fam.random_tokens(30)
        with cache.session(tokens[:, :20]) as past:
            for begin, end in ((0, 20), *((step, step + 1) for step in range(20, 30))):
                mask = torch.ones(1, end, dtype=torch.int64)
                mask[0, 3] = end != (20 if at == "in the prompt" else 30)
                positions = torch.arange(begin, end)[None]
                fam.forward(cache.model, tokens[:, begin:end], past, attention_mask=mask, position_ids=positions)
        self.check_nothing_kept(cache, caplog, "attention_mask")

    def test_masks_of_steps_are_not_held(self, cache: HiCache) -> None:
        tokens = fam.random_tokens(60)
        held: list[weakref.ref[torch.Tensor]] = []
        with cache.session(tokens[:, :20]) as past:
            for begin, end in ((0, 20), *((step, step + 1) for step in range(20, 60))):
                mask = torch.ones(1, end, dtype=torch.int64)
                held.append(weakref.ref(mask))
                positions = torch.arange(begin, end)[None]
                fam.forward(cache.model, tokens[:, begin:end], past, attention_mask=mask, position_ids=positions)
                del mask
            assert [each for each in held[1:-1] if each() is not None] == []
        assert cache.stats().device_tokens == 56

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
            with contextlib.suppress(fam.LeftError), cache.session(tokens) as past:
                assert past.cached_tokens == cached
                raise fam.LeftError

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
        with cache.session(prompt) as past:
            for _ in range(2):
                with pytest.raises(RuntimeError, match="injected"):
                    fam.forward(cache.model, prompt[:, 32:], past)
                cache.tiers.tree.poll()  # as any other session's entry does; the load is over for the tree from here on
            past.reset()
            fam.forward(cache.model, prompt, past)
        monkeypatch.undo()
        expected = fam.forward(cache.model, prompt[:, 32:], fam.compute_prefix(cache.model, prompt[:, :32]).cache())
        with cache.session(prompt) as past:
            assert past.cached_tokens == 32
            torch.testing.assert_close(fam.forward(cache.model, prompt[:, 32:], past), expected)
        fam.check(cache)


def test_memory_that_a_transfer_still_uses_is_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = fam.open_cache(fam.make_model("llama", seed=1))
    tiers = cache.tiers
    with monkeypatch.context() as patch:
        patch.setattr(tiers.controller, "shutdown", lambda: False)
        with pytest.raises(RuntimeError, match="was not given back"):
            cache.close()
    assert tiers.group.anchor_entry.host_pool.page_memory(0)
    tiers.close()


class Closes(FileStorage):
    """A storage that counts how often it is closed."""

    closes = 0

    def close(self) -> None:
        """Close it."""
        self.closes += 1
        super().close()


class TestWhatFailsGivesEverythingBack:
    """An error on the way in or out leaves no storage open, no thread running and no memory taken."""

    @pytest.mark.parametrize("step", ["attach", "mark"])
    def test_a_storage_of_the_caller_stays_open_and_any_other_is_closed(
        self, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> None:
            raise OSError("injected")

        if step == "attach":
            monkeypatch.setattr(HybridCacheController, "attach_storage_backend", fail)
        else:
            monkeypatch.setattr(cache_module.SettingsWatch, "weights_mark", fail)
        model = fam.make_model("llama", seed=1)
        opened: list[Closes] = []

        def open_storage(fingerprint: Fingerprint) -> Closes:
            opened.append(Closes(tmp_path, fingerprint=fingerprint))
            return opened[-1]

        threads = set(threading.enumerate())
        with pytest.raises(OSError, match="injected"):
            fam.open_cache(model, storage=open_storage)
        assert [each.closes for each in opened] == [1]
        fingerprint = model_fingerprint(model, "tiny", revision=None, page_size=fam.PAGE)
        with contextlib.closing(open_storage(fingerprint)) as mine:
            with pytest.raises(OSError, match="injected"):
                fam.open_cache(model, storage=mine)
            assert mine.closes == 0
        assert set(threading.enumerate()) <= threads

    @pytest.mark.parametrize("step", ["drain", "detach"])
    def test_closing_goes_on_after_a_step_that_raises(
        self, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened: list[Closes] = []

        def open_storage(fingerprint: Fingerprint) -> Closes:
            opened.append(Closes(tmp_path, fingerprint=fingerprint))
            return opened[-1]

        def fail() -> None:
            raise OSError("injected")

        threads = set(threading.enumerate())
        cache = fam.open_cache(fam.make_model("llama", seed=1), storage=open_storage)
        owner, name = {
            "drain": (cache.tiers.tree, "drain"),
            "detach": (cache.tiers.controller, "detach_storage_backend"),
        }[step]
        monkeypatch.setattr(owner, name, fail)
        with pytest.raises(OSError, match="injected"):
            cache.close()
        cache.close()
        assert set(threading.enumerate()) <= threads
        assert [each.closes for each in opened] == [1]
        with pytest.raises(RuntimeError, match="destroyed"):
            cache.tiers.group.anchor_entry.host_pool.page_memory(0)

    def test_tiers_whose_tree_cannot_be_made_leave_no_thread_and_no_memory(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given: list[HybridCacheController] = []

        def fail(controller: HybridCacheController, *_: Any, **__: Any) -> None:
            given.append(controller)
            raise OSError("injected")

        threads = set(threading.enumerate())
        monkeypatch.setattr(tiers_module, "UnifiedRadixCache", fail)
        with pytest.raises(OSError, match="injected"):
            fam.open_cache(fam.make_model("llama", seed=1))
        assert set(threading.enumerate()) <= threads
        with pytest.raises(RuntimeError, match="destroyed"):
            given[0].host_group.anchor_entry.host_pool.page_memory(0)
