"""Which models and storages the prefix cache of transformers takes, and what it says of those it does not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from tests.together import transformers_families as fam
from transformers import cache_utils
from transformers.cache_utils import LinearAttentionLayer

from hicache_controller.integrations.transformers import HiCache, UnsupportedError
from hicache_controller.integrations.transformers import model_layout as layout_module
from hicache_controller.integrations.transformers.identity import model_fingerprint
from hicache_controller.integrations.transformers.model_layout import LayerLayout, model_layout
from hicache_controller.storage import Fingerprint, HiCacheStorage, MemoryStorage
from hicache_controller.storage.contract import FaultyStorage
from hicache_controller.storage.file import FileStorage

pytestmark = [
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),
    pytest.mark.usefixtures("one_thread"),
]
TINY = {
    "vocab_size": fam.VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def recurrent_gemma() -> Any:
    options = {"num_key_value_heads": 1, "lru_width": 32, "attention_window_size": 21, "num_hidden_layers": 6}
    return transformers.RecurrentGemmaForCausalLM(transformers.RecurrentGemmaConfig(**TINY | options)).eval()


def minimax() -> Any:
    options = {"num_local_experts": 2, "head_dim": 8, "block_size": 16}
    return transformers.MiniMaxForCausalLM(transformers.MiniMaxConfig(**TINY | options)).eval()


def openai_gpt() -> Any:
    config = transformers.OpenAIGPTConfig(vocab_size=fam.VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    return transformers.OpenAIGPTLMHeadModel(config).eval()


def modernbert_decoder() -> Any:
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    options = {"local_attention": 16, "num_hidden_layers": 3, "max_position_embeddings": 256}
    config = transformers.ModernBertDecoderConfig(**TINY | tokens | options)
    return transformers.ModernBertDecoderForCausalLM(config).eval()


def gemma3_with_images() -> Any:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(
        text_config=TINY | {"head_dim": 16, "sliding_window": 21},
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=63,
        boi_token_index=62,
        eoi_token_index=61,
    )
    return transformers.Gemma3ForConditionalGeneration(config).eval()


class TestModels:
    def test_states_that_are_kept_in_the_model_itself_are_refused(self) -> None:
        with pytest.raises(UnsupportedError, match=r"layer 0 left its \w+ empty"):
            fam.open_cache(recurrent_gemma())

    def test_layers_that_keep_nothing_by_design_are_taken(self) -> None:
        model = fam.make_model("llama", seed=1)
        # A decoder whose second layer is no attention: its place in the cache stays empty.
        del model.model.layers[1].self_attn
        model.model.layers[1].forward = lambda hidden_states, *_, **__: hidden_states
        nothing = "dummy" if hasattr(cache_utils, "DummyLayer") else "mlp"
        model.config.layer_types = ["full_attention", nothing, "full_attention"]
        layout = model_layout(model)
        assert layout.full == (0, 2)
        assert layout.layers[1].kind is None

    @pytest.mark.parametrize(
        ("layer_type", "accepted"), [("moe", True), ("mlp", True), ("mamba", False), (None, False)]
    )
    def test_versions_without_a_layer_for_that_tell_it_by_its_type(
        self, layer_type: str | None, accepted: bool
    ) -> None:
        with contextlib.nullcontext() if accepted else pytest.raises(UnsupportedError, match="layer 3 left its Linear"):
            assert layout_module._layer_layout(3, LinearAttentionLayer(), layer_type) == LayerLayout()

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (minimax, "MiniMaxForCausalLM cannot run two tokens on transformers' own cache: ValueError"),
            (openai_gpt, "the model kept nothing in the cache it was given"),
            (recurrent_gemma, "empty; what it keeps elsewhere, as in the model itself, cannot be restored"),
        ],
    )
    def test_a_model_that_is_not_supported_generates_uncached_where_that_is_allowed(
        self, make: Callable[[], Any], message: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        model, prompt = make(), fam.random_tokens(20)
        with pytest.raises(UnsupportedError, match=message):
            fam.open_cache(model)
        with fam.open_cache(model, on_unsupported="uncached") as cache:
            with cache.session(prompt) as past:
                assert past is None
                model.generate(prompt, past_key_values=past, max_new_tokens=3, do_sample=False)
            cache.flush()
            assert cache.drop_device() == 0
            held = cache.stats()
            assert set(vars(held).values()) == {0}
        assert sum(message in record.message for record in caplog.records) == 1
        assert not model.base_model._forward_pre_hooks

    def test_no_room_to_run_it_is_not_taken_for_a_model_that_is_not_supported(self) -> None:
        model = fam.make_model("llama", seed=1)

        def fail(*_: Any, **__: Any) -> None:
            raise torch.OutOfMemoryError("injected")

        model.model.layers[0].register_forward_pre_hook(fail)
        with pytest.raises(torch.OutOfMemoryError, match="injected"):
            fam.open_cache(model, on_unsupported="uncached")

    def test_a_model_whose_get_decoder_is_a_part_of_its_head_is_cached(self) -> None:
        model, prompt = modernbert_decoder(), fam.random_tokens(45)
        assert not hasattr(model.get_decoder(), "layers")
        with fam.open_cache(model) as cache:
            for cached in (0, 40):
                with cache.session(prompt) as past:
                    assert past.cached_tokens == cached
                    logits = fam.forward(model, prompt[:, cached:], past)
            fresh = fam.forward(model, prompt, fam.DynamicCache(config=model.config))
            torch.testing.assert_close(logits, fresh[:, 40:])

    def test_a_model_that_gives_its_decoder_embeddings_says_that_nothing_is_cached(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        model, prompt = gemma3_with_images(), torch.randint(1, 60, (1, 45))
        with fam.open_cache(model) as cache:
            logged = [record.message for record in caplog.records if record.name.startswith("hicache_controller")]
            assert len(logged) == 1
            assert "prompts will not be cached" in logged[0]
            expected = model.generate(prompt, max_new_tokens=5, do_sample=False)
            for _ in range(2):
                with cache.session(prompt) as past:
                    assert past.cached_tokens == 0
                    output = model.generate(prompt, past_key_values=past, max_new_tokens=5, do_sample=False)
                assert torch.equal(output, expected)
            assert cache.stats().device_tokens == 0

    def test_a_model_of_text_alone_does_not_say_so(self, caplog: pytest.LogCaptureFixture) -> None:
        with fam.open_cache(fam.make_model("gemma3", seed=1)):
            assert not [record for record in caplog.records if record.name.startswith("hicache_controller")]


class TestSizes:
    @pytest.mark.parametrize(
        ("family", "need"),
        [("llama", "a page of this model needs"), ("gemma3", "a page of this model and 8 windows or states need")],
    )
    def test_a_tier_that_is_too_small_is_refused_with_what_the_model_needs(self, family: str, need: str) -> None:
        model = fam.make_model(family, seed=1)
        with pytest.raises(ValueError, match=rf"^l1_gb, by default a part of l2_gb, is 2.5e-07 GB; {need} "):
            fam.open_cache(model, l2_gb=1e-6)
        with pytest.raises(ValueError, match=rf"^l2_gb is 1e-06 GB; {need} "):
            fam.open_cache(model, l1_gb=0.1, l2_gb=1e-6)


class TestStorage:
    """A backend's fingerprint is the model's, or it has none."""

    @pytest.mark.parametrize("family", ["llama", "mistral", "falcon_h1"])
    def test_a_backend_for_the_pages_of_another_model_is_refused(self, family: str, tmp_path: Path) -> None:
        model, prompt = fam.make_model(family, seed=1), fam.random_tokens(45)
        with contextlib.closing(FileStorage(tmp_path, fingerprint=Fingerprint("tiny", revision="1"))) as storage:
            with pytest.raises(ValueError, match=r"FileStorage made for another finger.*pass a directory, or a f"):
                fam.open_cache(model, storage=storage)
            assert storage.stats().pages == 0
        # With other weights the same model id, and all that was given with it, is another fingerprint.
        fingerprint = model_fingerprint(fam.make_model(family, seed=2), "tiny", revision=None, page_size=fam.PAGE)
        with (
            contextlib.closing(FileStorage(tmp_path, fingerprint=fingerprint)) as storage,
            pytest.raises(ValueError, match="another fingerprint"),
        ):
            fam.open_cache(model, storage=storage)
        with fam.open_cache(model, storage=tmp_path) as cache, cache.session(prompt) as past:
            assert past.cached_tokens == 0

    def test_a_function_that_ignores_the_fingerprint_is_refused_and_its_backend_closed(self, tmp_path: Path) -> None:
        made: list[FileStorage] = []

        def make(_: Fingerprint) -> HiCacheStorage:
            made.append(FileStorage(tmp_path, fingerprint=Fingerprint("tiny", revision="1")))
            return made[0]

        with pytest.raises(ValueError, match="another fingerprint"):
            fam.open_cache(fam.make_model("llama", seed=1), storage=make)
        with pytest.raises(RuntimeError, match="closed"):
            made[0].clear()

    @pytest.mark.parametrize("kind", ["function", "backend"])
    def test_a_backend_for_this_very_model_is_taken(self, kind: str, tmp_path: Path) -> None:
        model, prompt = fam.make_model("llama", seed=1), fam.random_tokens(45)

        def make(fingerprint: Fingerprint) -> HiCacheStorage:
            return FileStorage(tmp_path, fingerprint=fingerprint)

        for cached in (0, 40):
            with contextlib.ExitStack() as stack:
                storage: Any = make
                if kind == "backend":
                    fingerprint = model_fingerprint(model, "tiny", revision=None, page_size=fam.PAGE)
                    storage = stack.enter_context(contextlib.closing(make(fingerprint)))
                cache = stack.enter_context(fam.open_cache(model, storage=storage))
                with cache.session(prompt) as past:
                    assert past.cached_tokens == cached
                    fam.forward(model, prompt[:, cached:], past)
                cache.flush()

    def test_a_backend_without_fingerprints_is_its_callers_to_answer_for(self) -> None:
        model, prompt = fam.make_model("llama", seed=1), fam.random_tokens(45)
        backend = FaultyStorage(MemoryStorage())
        with fam.open_cache(model, storage=backend) as cache:
            served(cache, prompt, 0)
            cache.drop_device()
            tree = cache.tiers.tree
            tree.evict_host(tree.stats().host_pages)
            served(cache, prompt, 40)


def served(cache: HiCache, prompt: torch.Tensor, cached: int) -> None:
    with cache.session(prompt) as past:
        assert past.cached_tokens == cached
        fam.forward(cache.model, prompt[:, cached:], past)
    cache.flush()
