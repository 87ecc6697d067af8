"""What a session notes of the passes it sees: nothing is kept under tokens that do not say how it was computed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

from tests.together import transformers_families as fam
from transformers import DynamicCache, GenerationConfig, GitConfig, GitForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.cache_utils import StaticLayer

from hicache_controller.integrations.transformers import HiCache, UnsupportedError
from hicache_controller.integrations.transformers.recorder import Recorder

pytestmark = [
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),
    pytest.mark.usefixtures("one_thread"),
]
static_crops = pytest.mark.skipif(
    not hasattr(StaticLayer, "crop"), reason="this version of transformers crops no static cache"
)
either = pytest.mark.parametrize("static", [False, pytest.param(True, marks=static_crops)])


@pytest.fixture
def cache(models: dict[str, Any]) -> Iterator[HiCache]:
    with fam.open_cache(models.setdefault("llama", fam.make_model("llama", seed=1))) as cache:
        yield cache
        fam.check(cache)


def served(cache: HiCache, tokens: torch.Tensor) -> int:
    """Tokens that are restored of a prompt with three more behind it; what follows them must be as computed anew."""
    prompt = torch.cat([tokens, fam.random_tokens(3)], 1)
    count = -1
    with contextlib.suppress(fam.LeftError), cache.session(prompt, checkpoints=()) as past:
        count = past.cached_tokens
        logits = fam.forward(cache.model, prompt[:, count:], past)
        fresh = fam.forward(cache.model, prompt, DynamicCache(config=cache.model.config))
        torch.testing.assert_close(logits, fresh[:, count:])
        raise fam.LeftError
    return count


def compute(cache: HiCache, prompt: torch.Tensor, **options: Any) -> None:
    with cache.session(prompt, **options) as past:
        fam.forward(cache.model, prompt, past)


def spans(prompt: int, end: int) -> Iterator[tuple[int, int]]:
    """A prompt and the steps behind it."""
    yield (0, prompt)
    yield from ((step, step + 1) for step in range(prompt, end))


class TestBuffersOfTheCaller:
    def test_one_tensor_for_every_step_is_noted_with_what_it_held(self, cache: HiCache) -> None:
        tokens = fam.random_tokens(40)
        buffer = torch.empty((1, 1), dtype=torch.int64)
        with cache.session(tokens[:, :8]) as past:
            fam.forward(cache.model, tokens[:, :8], past)
            for step in range(8, 40):
                fam.forward(cache.model, buffer.copy_(tokens[:, step : step + 1]), past)
        assert served(cache, torch.cat([tokens[:, :8], tokens[:, -1:].expand(1, 32)], 1)) <= 32
        assert served(cache, tokens) == 40

    def test_positions_are_noted_as_they_were(self, cache: HiCache) -> None:
        tokens = fam.random_tokens(24)
        positions = torch.arange(5, 29)[None]
        with cache.session(tokens) as past:
            fam.forward(cache.model, tokens, past, position_ids=positions)
            positions.sub_(5)
        assert served(cache, tokens) == 0

    @pytest.mark.parametrize("restored", [False, True])
    def test_a_prompt_that_is_overwritten_before_the_end_is_kept_as_it_was(
        self, cache: HiCache, restored: bool
    ) -> None:
        first, second = fam.random_tokens(40), fam.random_tokens(40)
        if restored:
            compute(cache, first)
        buffer = first.clone()
        with cache.session(buffer) as past:
            fam.forward(cache.model, first[:, past.cached_tokens :], past)
            buffer.copy_(second)
        assert served(cache, second) == 0
        assert served(cache, first) == 40


class TestRewinds:
    """After a crop or a reset, what was computed before it says nothing about what stands there."""

    @either
    @pytest.mark.parametrize("seen", [True, False])
    def test_what_was_cropped_and_computed_otherwise_is_not_kept(
        self, cache: HiCache, static: bool, seen: bool
    ) -> None:
        prompt, other = fam.random_tokens(40), fam.random_tokens(16)
        # The hooks are on one of two models with the same weights.
        model = cache.model if seen else fam.make_model("llama", seed=1)
        with cache.session(prompt, max_cache_len=64 if static else None) as past:
            fam.forward(cache.model, prompt, past)
            past.crop(-20)
            past.crop(4 - 8)
            fam.forward(model, other, past)
            past.crop(-3)
            fam.forward(model, other[:, :3], past)
        assert served(cache, prompt) == 16
        turned = torch.cat([prompt[:, :16], other[:, :13], other[:, :3]], 1)
        assert served(cache, turned) == (16 if static or not seen else 32)

    @static_crops
    def test_a_static_cache_that_was_reset_keeps_nothing_from_before(self, cache: HiCache) -> None:
        prompt, other = fam.random_tokens(40), fam.random_tokens(40)
        with cache.session(prompt, max_cache_len=64) as past:
            fam.forward(cache.model, prompt, past)
            past.reset()
            fam.forward(cache.model, other, past)
            past.crop(-4)
        assert served(cache, prompt) == served(cache, other) == 0

    @static_crops
    def test_a_static_cache_keeps_nothing_behind_the_prompt_where_nobody_looks(self, cache: HiCache) -> None:
        tokens, other = fam.random_tokens(56), fam.random_tokens(16)
        with cache.session(tokens[:, :40], max_cache_len=64) as past:
            fam.forward(cache.model, tokens, past)
            for layer in past.layers:
                layer.crop(-16)
            fam.forward(cache.model, other, past)
        assert served(cache, tokens) == 40

    @either
    def test_what_follows_a_restored_prefix_that_was_cropped_is_not_kept_behind_it(
        self, cache: HiCache, static: bool
    ) -> None:
        prompt, other = fam.random_tokens(56), fam.random_tokens(24)
        compute(cache, prompt[:, :40])
        with cache.session(prompt, max_cache_len=64 if static else None) as past:
            assert past.cached_tokens == 40
            past.crop(-24)
            fam.forward(fam.make_model("llama", seed=1), other, past)
            fam.forward(cache.model, prompt[:, 40:], past)
        assert served(cache, prompt) == 40

    @either
    def test_candidates_of_prompt_lookup_are_kept_only_where_they_were_accepted(
        self, cache: HiCache, static: bool
    ) -> None:
        for _ in range(5):
            prompt = fam.random_tokens(12).repeat(1, 4)[:, :41]
            first: list[torch.Tensor] = []
            hook = cache.model.get_decoder().register_forward_pre_hook(
                lambda module, arguments, options, first=first: first.append(options["input_ids"].clone()),
                with_kwargs=True,
            )
            with cache.session(prompt, max_cache_len=96 if static else None) as past:
                output = cache.model.generate(
                    prompt, past_key_values=past, max_new_tokens=16, do_sample=False, prompt_lookup_num_tokens=8
                )
            hook.remove()
            assert first[0].shape[1] == 49
            accepted = int((first[0] == output[:, :49]).cumprod(1).sum())
            assert served(cache, first[0]) == (40 if static else accepted // fam.PAGE * fam.PAGE)

    def test_what_a_pass_that_failed_may_have_overwritten_is_not_kept(self, cache: HiCache) -> None:
        prompt, other = fam.random_tokens(40), fam.random_tokens(16)

        def fail(*_: Any) -> None:
            raise OSError("injected")

        with cache.session(prompt) as past:
            fam.forward(cache.model, prompt, past)
            for layer in past.layers:
                layer.crop(-16)
            hook = cache.model.get_decoder().layers[-1].register_forward_hook(fail)
            with pytest.raises(OSError, match="injected"):
                fam.forward(cache.model, other, past)
            hook.remove()
            fam.forward(fam.make_model("llama", seed=1), other[:, :1], past)
            past.layers[2].update(*(torch.zeros(1, 2, 16, 8) for _ in range(2)))
        assert served(cache, prompt) == 24


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

    @pytest.mark.parametrize("length", [10, 30])
    def test_a_mask_of_another_length_is_not_trusted(self, cache: HiCache, length: int) -> None:
        tokens = fam.random_tokens(24)
        mask = torch.ones(1, length, dtype=torch.int64)
        with cache.session(tokens) as past:
            fam.forward(cache.model, tokens, past, attention_mask=mask, position_ids=torch.arange(24)[None])
        assert served(cache, tokens) == 0

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

    def test_attention_that_is_told_not_to_be_causal_is_not_kept(self, cache: HiCache) -> None:
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

    def test_a_longer_text_behind_the_prompt_is_no_prompt_given_again(
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


def test_a_session_computes_nothing_of_a_prompt_with_images_by_itself() -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_5")
    recurrent = fam.FAMILIES["qwen3_next"][3]
    text = fam.COMMON | {name: value for name, value in recurrent.items() if name.startswith(("head", "l"))}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32}
    vision |= {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16}
    image = fam.VOCABULARY - 1
    with torch.random.fork_rng():
        config = qwen.Qwen3_5Config(text_config=text, vision_config=vision, image_token_id=image)
        model = qwen.Qwen3_5ForConditionalGeneration(config).eval()
    words = fam.random_tokens(41).clamp(max=image - 5)
    prompt = torch.cat([words[:, :5], torch.full((1, 4), image), words[:, 5:]], 1)
    options = {
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (prompt == image).long(),
        "max_new_tokens": 4,
        "do_sample": False,
    }
    expected = model.generate(prompt, **options)
    with fam.open_cache(model) as cache:
        for _ in range(2):
            with cache.session(prompt) as past:
                assert past.get_seq_length() == 0
                assert torch.equal(model.generate(prompt, past_key_values=past, **options), expected)
        assert cache.stats().device_tokens == 0
        fam.check(cache)


@pytest.mark.parametrize("model", ["falcon_h1", "qwen3_next"], indirect=True)
@pytest.mark.parametrize("restored", [False, True])
def test_beams_that_nobody_told_of_are_named_for_states_as_well(model: Any, restored: bool) -> None:
    prompt = fam.random_tokens(20)
    with fam.open_cache(model) as cache:
        if restored:
            fam.keep(cache, prompt, 16)
        refused = pytest.raises(UnsupportedError, match="beam search and several return sequences")
        with refused, cache.session(prompt) as past:
            model.generate(prompt, past_key_values=past, num_beams=2, max_new_tokens=3, do_sample=False)
        fam.check(cache)


def test_prompt_lookup_that_is_told_of_is_refused_in_time(cache: HiCache) -> None:
    with pytest.raises(UnsupportedError, match="prompt_lookup_num_tokens is 3"):
        cache.session(fam.random_tokens(20), generation_config=GenerationConfig(prompt_lookup_num_tokens=3))


@pytest.mark.parametrize("static", [False, True])
def test_compiling_the_prompt_into_one_graph_says_what_to_do(static: bool) -> None:
    model = fam.make_model("llama", seed=1)
    prompt = fam.random_tokens(45)
    expected = model.generate(prompt, max_new_tokens=4, do_sample=False)
    options = {"max_cache_len": 64} if static else {}
    forward = model.forward
    try:
        with fam.open_cache(model) as cache:
            model.forward = torch.compile(forward, fullgraph=True, backend="eager")
            refused = pytest.raises(RuntimeError, match="compile the steps, not the prompt")
            with refused, cache.session(prompt, **options) as past:
                model.generate(prompt, past_key_values=past, max_new_tokens=4, do_sample=False)
            torch._dynamo.reset()
            model.forward = torch.compile(forward, backend="eager")
            for cached in (0, 40):
                with cache.session(prompt, **options) as past:
                    assert past.cached_tokens == cached
                    output = model.generate(prompt, past_key_values=past, max_new_tokens=4, do_sample=False)
                assert torch.equal(output, expected)
    finally:
        torch._dynamo.reset()


class Reads(TorchDispatchMode):
    """Counts the numbers that Python reads out of tensors."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("padded", [False, True])
def test_a_step_waits_for_nothing_on_the_device(cache: HiCache, monkeypatch: pytest.MonkeyPatch, padded: bool) -> None:
    tokens = fam.random_tokens(60, batch=2)
    mask = torch.ones_like(tokens)
    mask[0, : 4 if padded else 0] = 0
    positions = (mask.cumsum(1) - 1).clamp(0)
    reads, me = Reads(), threading.get_ident()

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        reads.count += threading.get_ident() == me
        return tensor.to("cpu")

    for name in ("_before", "_after"):
        inner = getattr(Recorder, name)

        def watched(self: Recorder, *arguments: Any, inner: Any = inner) -> None:
            with reads, pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.Tensor, "cpu", copied)
                inner(self, *arguments)

        monkeypatch.setattr(Recorder, name, watched)
    with cache.session(tokens[:, :20], attention_mask=mask[:, :20]) as past:
        for begin, end in spans(20, 60):
            fam.forward(
                cache.model,
                tokens[:, begin:end],
                past,
                attention_mask=mask[:, :end],
                position_ids=positions[:, begin:end],
            )
        assert reads.count == 0
    assert served(cache, tokens[1:]) == 56
    assert reads.count == 0
