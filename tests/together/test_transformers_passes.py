"""Passes that depend on more than the tokens, or that do not fit a restored prefix: masks, positions and conditions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.together import transformers_families as fam
from tests.together.transformers_served import compute, served
from transformers import DynamicCache, GitConfig, GitForCausalLM, GPT2Config, GPT2LMHeadModel

from hicache_controller.integrations.transformers import HiCache

pytestmark = [
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture
def cache(models: dict[str, Any]) -> Iterator[HiCache]:
    with fam.open_cache(models.setdefault("llama", fam.make_model("llama", seed=1))) as cache:
        yield cache
        fam.check(cache)


class TestMasks:
    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("at", [1, 2, 3])
    def test_a_mask_of_any_pass_that_hid_tokens_is_seen(self, cache: HiCache, at: int, padded: bool) -> None:
        pad = 4 if padded else 0
        tokens = fam.random_tokens(44)
        shown = torch.ones_like(tokens)
        shown[:, :pad] = 0
        with cache.session(tokens[:, :16], attention_mask=shown[:, :16]) as past:
            for number, (begin, end) in enumerate(((0, 16), (16, 24), (24, 30), (30, 44))):
                mask = shown[:, :end].clone()
                if number == at:
                    mask[0, 6:9] = 0
                positions = torch.arange(begin, end)[None] - pad
                fam.forward(
                    cache.model, tokens[:, begin:end], past, attention_mask=mask, position_ids=positions.clamp(0)
                )
        # Passes that follow one another are judged together.
        assert served(cache, tokens[:, pad:]) == 0

    def test_a_mask_that_comes_with_a_later_pass_alone_is_seen(self, cache: HiCache) -> None:
        tokens = fam.random_tokens(40)
        with cache.session(tokens) as past:
            for begin, end in ((0, 16), (16, 24), (24, 40)):
                mask = torch.ones(1, end, dtype=torch.int64)
                mask[0, 5] = 0
                options = {"attention_mask": mask} if begin == 16 else {}
                positions = torch.arange(begin, end)[None]
                fam.forward(cache.model, tokens[:, begin:end], past, position_ids=positions, **options)
        assert served(cache, tokens) == 0

    @pytest.mark.parametrize(("length", "hidden"), [(10, None), (30, 26), (30, 3)])
    def test_a_mask_of_another_length_is_not_trusted(self, cache: HiCache, length: int, hidden: int | None) -> None:
        tokens = fam.random_tokens(24)
        mask = torch.ones(1, length, dtype=torch.int64)
        if hidden is not None:
            mask[0, hidden] = 0
        with cache.session(tokens) as past:
            fam.forward(cache.model, tokens, past, attention_mask=mask, position_ids=torch.arange(24)[None])
        assert served(cache, tokens) == 0

    @pytest.mark.parametrize("padded", [False, True])
    def test_a_longer_mask_that_shows_everything_is_as_good_as_none_without_padding(
        self, cache: HiCache, padded: bool
    ) -> None:
        pad, tokens = 4 if padded else 0, fam.random_tokens(44)
        mask = torch.ones(1, 64, dtype=torch.int64)
        mask[0, :pad] = 0
        positions = (torch.arange(44)[None] - pad).clamp(0)
        with cache.session(tokens[:, :16], attention_mask=mask[:, :16]) as past:
            for begin, end in ((0, 16), (16, 30), (30, 43), (43, 44)):
                fam.forward(
                    cache.model, tokens[:, begin:end], past, attention_mask=mask, position_ids=positions[:, begin:end]
                )
        assert served(cache, tokens[:, pad:]) == (0 if padded else 40)

    def test_a_prompt_that_begins_again_after_its_prefix_is_reported(self, cache: HiCache) -> None:
        tokens = fam.random_tokens(44)
        fam.keep(cache, tokens, 44)
        again = pytest.raises(ValueError, match="attention_mask has 16 columns and the cache began with 40")
        with again, cache.session(tokens) as past:
            fam.forward(cache.model, tokens[:, :16], past, attention_mask=torch.ones(1, 16, dtype=torch.int64))

    def test_a_padded_batch_without_its_mask_is_not_kept(self, cache: HiCache) -> None:
        tokens = fam.random_tokens(44)
        mask = torch.ones_like(tokens)
        mask[:, :4] = 0
        positions = (torch.arange(44)[None] - 4).clamp(0)
        with cache.session(tokens, attention_mask=mask) as past:
            fam.forward(cache.model, tokens, past, position_ids=positions)
        assert served(cache, tokens[:, 4:]) == 0
        with cache.session(tokens, attention_mask=mask) as past:
            fam.forward(cache.model, tokens, past, position_ids=positions, attention_mask=mask)
        assert served(cache, tokens[:, 4:]) == 40
        missing = pytest.raises(ValueError, match="attention_mask is missing")
        with missing, cache.session(tokens, attention_mask=mask) as past:
            fam.forward(cache.model, tokens[:, 36:], past, position_ids=positions[:, 36:])

    @pytest.mark.parametrize("none", [False, True])
    @pytest.mark.parametrize("model", ["gemma3", "qwen3"], indirect=True)
    def test_masks_of_several_kinds_of_layers_are_not_trusted(self, model: Any, none: bool) -> None:
        tokens = fam.random_tokens(40)
        everything = None if none else torch.ones(1, 1, 40, 40, dtype=torch.bool)
        masks = dict.fromkeys(("full_attention", "sliding_attention"), everything)
        with fam.open_cache(model) as cache:
            with cache.session(tokens) as past:
                fam.forward(model, tokens, past, attention_mask=masks)
            assert served(cache, tokens) == 0

    @pytest.mark.parametrize(
        "change", ["none", "future", "hidden", "bias"], ids=["as generate makes it", "future", "hidden", "bias"]
    )
    @pytest.mark.parametrize("added", [False, True])
    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("several", [False, True])
    def test_masks_of_a_static_cache_are_compared_with_the_causal_one(
        self, models: dict[str, Any], change: str, added: bool, padded: bool, several: bool
    ) -> None:
        model = models.setdefault("qwen3", fam.make_model("qwen3", seed=1))
        pad = 4 if padded else 0
        tokens = fam.random_tokens(44)
        places = torch.arange(64)
        mask = (places <= torch.arange(44)[:, None]) & (places >= pad)
        if change == "future":
            mask[20, 30] = True
        elif change == "hidden":
            mask[20, 10] = False
        mask = mask[None, None]
        if added or change == "bias":
            mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
            if change == "bias":
                mask[0, 0, 20, 30] = -1.0
        shown = torch.ones_like(tokens)
        shown[:, :pad] = 0
        with fam.open_cache(model) as cache:
            with cache.session(tokens, attention_mask=shown, max_cache_len=64) as past:
                fam.forward(
                    model,
                    tokens,
                    past,
                    attention_mask={"full_attention": mask} if several else mask,
                    position_ids=(torch.arange(44)[None] - pad).clamp(0),
                )
            assert served(cache, tokens[:, pad:]) == ((44 - pad) // 8 * 8 if change == "none" else 0)

    def test_no_mask_for_a_kind_of_layer_means_causal_only_where_the_kernel_says_so(self) -> None:
        tokens = fam.random_tokens(40)
        for kernel, cached in (("sdpa", 40), ("eager", 0)):
            model = fam.make_model("qwen3", seed=1)
            model.set_attn_implementation(kernel)
            with fam.open_cache(model) as cache:
                with cache.session(tokens, max_cache_len=64) as past, contextlib.suppress(RuntimeError):
                    fam.forward(model, tokens, past, attention_mask={"full_attention": None})
                assert served(cache, tokens) == cached


class TestPassesThatDependOnMoreThanTokens:
    @pytest.fixture
    def gpt2(self, models: dict[str, Any]) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            config = GPT2Config(
                vocab_size=fam.VOCABULARY, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
            )
            return models.setdefault("gpt2", GPT2LMHeadModel(config).eval())

    def test_types_of_tokens_are_not_kept_under_the_tokens(self, gpt2: Any, caplog: pytest.LogCaptureFixture) -> None:
        tokens = fam.random_tokens(40)
        with fam.open_cache(gpt2) as cache:
            with cache.session(tokens) as past:
                fam.forward(gpt2, tokens, past, token_type_ids=torch.full_like(tokens, 5))
            assert served(cache, tokens) == 0
            assert sum("given token_type_ids" in record.message for record in caplog.records) == 1
            compute(cache, tokens)
            assert served(cache, tokens) == 40

    def test_a_restored_prefix_is_refused_where_it_was_computed_without_them(self, gpt2: Any) -> None:
        tokens = fam.random_tokens(45)
        types = torch.full_like(tokens, 5)
        with fam.open_cache(gpt2) as cache:
            compute(cache, tokens)
            refused = pytest.raises(ValueError, match=r"token_type_ids.* began with 40 tokens")
            with refused, cache.session(tokens) as past:
                fam.forward(gpt2, tokens[:, 40:], past, token_type_ids=types[:, 40:])
            with cache.session(tokens) as past:
                past.reset()
                logits = fam.forward(gpt2, tokens, past, token_type_ids=types)
            fresh = fam.forward(gpt2, tokens, DynamicCache(config=gpt2.config), token_type_ids=types)
            torch.testing.assert_close(logits, fresh)
            assert served(cache, tokens) == 40

    @pytest.mark.parametrize("first", [0, 5])
    def test_places_in_the_cache_are_compared(self, cache: HiCache, first: int) -> None:
        tokens = fam.random_tokens(40)
        with cache.session(tokens) as past:
            for begin, end in ((0, 16), (16, 40)):
                places = torch.arange(begin, end) + first
                fam.forward(cache.model, tokens[:, begin:end], past, cache_position=places)
        assert served(cache, tokens) == (0 if first else 40)

    def test_flags_that_say_what_is_returned_do_not_matter(self, cache: HiCache) -> None:
        tokens = fam.random_tokens(40)
        with cache.session(tokens) as past:
            fam.forward(cache.model, tokens, past, output_hidden_states=True, output_attentions=False)
        assert served(cache, tokens) == 40

    def test_attention_that_is_set_not_to_be_causal_is_not_kept(self, cache: HiCache) -> None:
        tokens = fam.random_tokens(40)
        with cache.session(tokens) as past:
            fam.forward(cache.model, tokens, past, is_causal=False)
        assert served(cache, tokens) == 0

    @pytest.mark.parametrize("image", [True, False])
    def test_images_are_not_kept_under_the_tokens(self, image: bool) -> None:
        tokens = fam.random_tokens(40)
        vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
        config = GitConfig(
            vocab_size=fam.VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            vision_config=vision | {"image_size": 16, "patch_size": 8},
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=None,
        )
        with torch.random.fork_rng():
            model = GitForCausalLM(config).eval()
        with fam.open_cache(model) as cache:
            with cache.session(tokens) as past:
                fam.forward(model, tokens, past, **({"pixel_values": torch.randn(1, 3, 16, 16)} if image else {}))
            assert served(cache, tokens) == (0 if image else 40)

    def test_columns_that_are_not_the_tokens_shift_nothing(
        self, cache: HiCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokens, image = fam.random_tokens(40), fam.random_tokens(5)
        decoder = cache.model.get_decoder()
        forward = decoder.forward

        def with_image(*arguments: Any, **options: Any) -> Any:
            forward(input_ids=image, use_cache=True, **{cache.cache_argument: past})
            return forward(*arguments, **options)

        with cache.session(tokens) as past:
            with monkeypatch.context() as patch:
                patch.setattr(decoder, "forward", with_image)
                fam.forward(cache.model, tokens, past)
            fam.forward(cache.model, fam.random_tokens(9), past)
        assert served(cache, tokens) == 0


class TestWhatDoesNotFitARestoredPrefix:
    @pytest.fixture
    def prompt(self, cache: HiCache) -> torch.Tensor:
        prompt = fam.random_tokens(43)
        compute(cache, prompt)
        return prompt

    @pytest.mark.parametrize("how", ["generate", "forward"])
    def test_a_mask_that_hides_part_of_it_is_an_error(self, cache: HiCache, prompt: torch.Tensor, how: str) -> None:
        mask = torch.ones_like(prompt)
        mask[0, 2:9] = 0
        refused = pytest.raises(ValueError, match=r"attention_mask hid.* began with 40 tokens")
        with refused, cache.session(prompt) as past:
            if how == "generate":
                cache.model.generate(prompt, past_key_values=past, attention_mask=mask, max_new_tokens=3)
            fam.forward(cache.model, prompt[:, 40:], past, attention_mask=mask)
        fam.check(cache)
        assert served(cache, prompt) == 40

    def test_a_mask_that_hides_what_follows_is_none(self, cache: HiCache, prompt: torch.Tensor) -> None:
        mask = torch.ones_like(prompt)
        mask[0, 41] = 0
        with cache.session(prompt) as past:
            logits = fam.forward(cache.model, prompt[:, 40:], past, attention_mask=mask)
            fam.forward(cache.model, fam.random_tokens(8), past)
        fresh = fam.forward(cache.model, prompt, DynamicCache(config=cache.model.config), attention_mask=mask)
        torch.testing.assert_close(logits, fresh[:, 40:])
        assert served(cache, prompt) == 40
        assert cache.stats().device_tokens == 40

    @pytest.mark.parametrize("model", ["falcon_h1"], indirect=True)
    def test_what_a_session_computes_as_it_begins_is_such_a_prefix_too(self, model: Any) -> None:
        prompt = fam.random_tokens(43)
        mask = torch.ones_like(prompt)
        mask[0, 2:9] = 0
        with fam.open_cache(model) as cache:
            with pytest.raises(ValueError, match=r"attention_mask hid"), cache.session(prompt) as past:
                model.generate(prompt, past_key_values=past, attention_mask=mask, max_new_tokens=3)
            with pytest.raises(ValueError, match=r"given is_causal"), cache.session(prompt) as past:
                fam.forward(model, prompt[:, past.get_seq_length() :], past, is_causal=False)
            with cache.session(prompt) as past:
                past.reset()
                fam.forward(model, prompt, past, attention_mask=mask)
            assert served(cache, prompt) == 0

    def test_positions_that_do_not_follow_it_are_an_error(self, cache: HiCache, prompt: torch.Tensor) -> None:
        with pytest.raises(ValueError, match="position_ids"), cache.session(prompt) as past:
            fam.forward(cache.model, prompt[:, 40:], past, position_ids=torch.arange(45, 48)[None])

    def test_a_longer_text_after_the_prompt_is_no_prompt_given_again(
        self, cache: HiCache, prompt: torch.Tensor
    ) -> None:
        longer = torch.cat([prompt, fam.random_tokens(60)], 1)
        expected = cache.model.generate(longer, max_new_tokens=4, do_sample=False)
        with cache.session(prompt) as past:
            assert past.cached_tokens == 40
            output = cache.model.generate(longer, past_key_values=past, max_new_tokens=4, do_sample=False)
        assert torch.equal(output, expected)
        assert served(cache, output[:, :106]) == 104
        with pytest.raises(ValueError, match="whole prompt"), cache.session(prompt) as past:
            fam.forward(cache.model, longer, past)
