"""What ``generate`` is given with a session's cache, and who uses it: errors come before anything is computed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.together import transformers_families as fam
from transformers import BloomConfig, BloomForCausalLM, T5Config, T5EncoderModel, T5ForConditionalGeneration

from hicache_controller.integrations.transformers import HiCache, UnsupportedError

pytestmark = [
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),
    pytest.mark.usefixtures("one_thread"),
]

GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}


@pytest.fixture
def cache() -> Iterator[HiCache]:
    with fam.open_cache(fam.make_model("llama", seed=1)) as cache:
        yield cache


@pytest.fixture
def computed(cache: HiCache, harmless_hooks: None) -> Iterator[list[int]]:
    """Tokens of each pass of the cache's model, of those that were not stopped before."""
    passes: list[int] = []
    hook = cache.model.lm_head.register_forward_hook(lambda *_: passes.append(1))
    yield passes
    hook.remove()


def keep_prompt(cache: HiCache) -> torch.Tensor:
    prompt = fam.random_tokens(45)
    fam.keep(cache, prompt, 40)
    return prompt


def refused(options: dict[str, Any]) -> Any:
    return pytest.raises(UnsupportedError, match=f"^{next(iter(options))} is ")


@pytest.mark.parametrize("restored", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": False},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_model": "another"},
        {"assistant_early_exit": 1},
        {"num_beams": 2},
        {"num_return_sequences": 2, "do_sample": True},
        {"token_healing": True},
    ],
    ids=str,
)
class TestArgumentsThatASessionCannotServe:
    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        if "assistant_model" in options:
            return GREEDY | {"assistant_model": fam.make_model("llama", seed=2)}
        return GREEDY | options

    def test_are_named_before_a_token_is_computed(
        self, cache: HiCache, computed: list[int], options: dict[str, Any], restored: bool
    ) -> None:
        prompt = keep_prompt(cache) if restored else fam.random_tokens(45)
        computed.clear()
        with refused(options), cache.session(prompt) as past:
            cache.model.generate(prompt, past_key_values=past, **self.options(options))
        assert computed == []
        fam.check(cache)

    def test_are_generated_with_and_without_the_cache_where_that_is_allowed(
        self, options: dict[str, Any], restored: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        if "token_healing" in options:
            pytest.skip("needs a tokenizer")
        with fam.open_cache(fam.make_model("llama", seed=1), on_unsupported="uncached") as cache:
            prompt = keep_prompt(cache) if restored else fam.random_tokens(45)
            outputs = []
            for session in (contextlib.nullcontext(None), cache.session(prompt)):
                torch.manual_seed(3)
                with session as past:
                    given = {} if past is None else {"past_key_values": past}
                    outputs.append(cache.model.generate(prompt, **given, **self.options(options)))
            assert torch.equal(*outputs)
        assert sum(f"{next(iter(options))} is " in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("use", ["generate", "generate of the class", "forward"])
@pytest.mark.parametrize("where", ["argument", "configuration"])
def test_use_cache_is_seen_wherever_it_is_set(cache: HiCache, computed: list[int], where: str, use: str) -> None:
    model, prompt = cache.model, keep_prompt(cache)
    given = {"use_cache": False} if where == "argument" else {}
    if where == "configuration":
        model.config.use_cache = model.generation_config.use_cache = False

    def run(past: Any) -> None:
        with torch.no_grad():
            if use == "forward":
                model(prompt[:, 40:], **given, **{cache.cache_argument: past})
            elif use == "generate":
                model.generate(prompt, past_key_values=past, **given, **GREEDY)
            else:
                type(model).generate(model, prompt, past_key_values=past, **given, **GREEDY)

    computed.clear()
    error = UnsupportedError if use == "generate" else ValueError
    with pytest.raises(error, match="use_cache is False"), cache.session(prompt) as past:
        run(past)
    assert computed == []
    with cache.session(prompt) as past:  # a pass that is given another one
        assert past.cached_tokens == 40
        fam.forward(model, prompt[:, 40:], past)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_assisted_decoding_is_seen_where_nobody_looks_at_generate(family: str) -> None:
    prompt = fam.random_tokens(45)
    with (
        fam.open_cache(fam.make_model(family, seed=1)) as cache,
        pytest.raises(UnsupportedError, match="assisted decoding"),
        cache.session(prompt, checkpoints=()) as past,
    ):
        type(cache.model).generate(cache.model, prompt, past_key_values=past, prompt_lookup_num_tokens=3, **GREEDY)


def other_tokens(tokens: torch.Tensor, *columns: int) -> torch.Tensor:
    other = tokens.clone()
    for column in columns:
        other[0, column] = tokens[0, column] % (fam.VOCABULARY - 1) + 1
    return other


class TestThePromptOfGenerate:
    @pytest.mark.parametrize("restored", [False, True])
    @pytest.mark.parametrize(
        "change",
        [
            lambda prompt: other_tokens(prompt, 3),  # hidden by the prefix, the rest is equal
            lambda prompt: other_tokens(prompt, 44),
            lambda prompt: fam.random_tokens(45),
            lambda prompt: prompt[:, :44],
            lambda prompt: prompt[:, 1:],
            lambda prompt: torch.cat([fam.random_tokens(1), prompt], 1),
        ],
        ids=["inside the prefix", "at the end", "all", "shorter", "without its beginning", "with another beginning"],
    )
    @pytest.mark.parametrize("family", ["llama", "mistral", "falcon_h1"])
    def test_has_to_be_that_of_the_session(
        self, family: str, change: Callable[[torch.Tensor], torch.Tensor], restored: bool
    ) -> None:
        with fam.open_cache(fam.make_model(family, seed=1)) as cache:
            prompt = keep_prompt(cache) if restored else fam.random_tokens(45)
            passes: list[int] = []
            hook = cache.model.lm_head.register_forward_hook(lambda *_: passes.append(1))
            with pytest.raises(ValueError, match="begin with the session's prompt"), cache.session(prompt) as past:
                cache.model.generate(change(prompt), past_key_values=past, **GREEDY)
            hook.remove()
            assert passes == []
            fam.check(cache)

    def test_may_go_on_after_it_and_be_the_rest_of_it_with_a_mask_of_all(self, cache: HiCache) -> None:
        prompt = keep_prompt(cache)
        longer = torch.cat([prompt, fam.random_tokens(5)], 1)
        for tokens in (prompt, longer):
            expected = cache.model.generate(tokens, **GREEDY)
            with cache.session(prompt) as past:
                assert torch.equal(cache.model.generate(tokens, past_key_values=past, **GREEDY), expected)
            with cache.session(prompt) as past:
                rest = cache.model.generate(
                    tokens[:, 40:], attention_mask=torch.ones_like(tokens), past_key_values=past, **GREEDY
                )
            assert torch.equal(rest[:, -4:], expected[:, -4:])

    def test_may_be_padded(self, cache: HiCache) -> None:
        prompt = torch.nn.functional.pad(keep_prompt(cache), (7, 0))
        mask = (prompt != 0).long()
        expected = cache.model.generate(prompt, attention_mask=mask, **GREEDY)
        with cache.session(prompt, attention_mask=mask) as past:
            assert past.cached_tokens == 47
            output = cache.model.generate(input_ids=prompt, attention_mask=mask, past_key_values=past, **GREEDY)
        assert torch.equal(output, expected)

    def test_of_the_next_turn_in_a_session_begins_with_what_its_cache_has(self, cache: HiCache) -> None:
        prompt = fam.random_tokens(45)
        with cache.session(prompt) as past:
            answer = cache.model.generate(prompt, past_key_values=past, **GREEDY)
            following = torch.cat([answer, fam.random_tokens(6)], 1)
            expected = cache.model.generate(following, **GREEDY)
            for wrong in (prompt, answer[:, :-1], other_tokens(following, 46)):
                with pytest.raises(ValueError, match="begin with the session's prompt"):
                    cache.model.generate(wrong, past_key_values=past, **GREEDY)
            assert torch.equal(cache.model.generate(following, past_key_values=past, **GREEDY), expected)


def test_generate_is_that_of_the_model_again_once_the_last_session_is_over(cache: HiCache) -> None:
    model, prompts = cache.model, [fam.random_tokens(45) for _ in range(2)]
    first, second = (cache.session(prompt) for prompt in prompts)
    first.__enter__()
    past = second.__enter__()
    first.__exit__(None, None, None)
    with pytest.raises(ValueError, match="begin with the session's prompt"):
        model.generate(prompts[0], past_key_values=past, **GREEDY)
    second.__exit__(None, None, None)
    assert "generate" not in vars(model)
    model.generate = own = lambda *_, **__: "mine"
    with cache.session(prompts[0]) as past:
        assert model.generate(prompts[0], past_key_values=past) == "mine"
    assert model.generate is own


@pytest.mark.parametrize("on_unsupported", ["error", "uncached"])
def test_padding_of_a_model_that_takes_no_positions(on_unsupported: Any) -> None:
    with torch.random.fork_rng():
        config = BloomConfig(vocab_size=fam.VOCABULARY, hidden_size=32, n_layer=2, n_head=4, pad_token_id=0)
        model = BloomForCausalLM(config).eval()
    prompts = fam.random_tokens(45, batch=2)
    padded, mask = prompts.clone(), torch.ones_like(prompts)
    padded[1, :6] = mask[1, :6] = 0
    with fam.open_cache(model, on_unsupported=on_unsupported) as cache:
        if on_unsupported == "error":
            with (
                pytest.raises(UnsupportedError, match="BloomForCausalLM takes no position_ids"),
                cache.session(padded, attention_mask=mask),
            ):
                pass
        else:
            expected = model.generate(padded, attention_mask=mask, **GREEDY)
            with cache.session(padded, attention_mask=mask) as past:
                assert past is None
                output = model.generate(padded, attention_mask=mask, past_key_values=past, **GREEDY)
            assert torch.equal(output, expected)
        expected = model.generate(prompts, **GREEDY)
        for cached in (0, 40):
            with cache.session(prompts) as past:
                assert past.cached_tokens == cached
                assert torch.equal(model.generate(prompts, past_key_values=past, **GREEDY), expected)


@pytest.mark.parametrize("kind", [T5EncoderModel, T5ForConditionalGeneration])
def test_encoders_are_named_as_the_cache_is_made(kind: Any) -> None:
    config = T5Config(vocab_size=64, d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8, decoder_start_token_id=0)
    with torch.random.fork_rng():
        model = kind(config).eval()
    with pytest.raises(UnsupportedError, match="encoder"):
        fam.open_cache(model)
    with (
        fam.open_cache(model, on_unsupported="uncached") as cache,
        cache.session(fam.random_tokens(20)) as past,
    ):
        assert past is None


class TestThreads:
    def in_another(self, call: Callable[[], Any]) -> BaseException | None:
        errors: list[BaseException | None] = []

        def run() -> None:
            try:
                call()
                errors.append(None)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="another")
        thread.start()
        thread.join(60)
        return errors[0]

    @pytest.mark.parametrize("call", ["enter", "exit", "flush", "drop_device", "close"])
    def test_one_is_refused_while_another_has_a_session_open(self, cache: HiCache, call: str) -> None:
        prompt = keep_prompt(cache)
        session = cache.session(prompt)
        with session as past:
            calls: dict[str, Callable[[], Any]] = {
                "enter": cache.session(prompt).__enter__,
                "exit": lambda: session.__exit__(None, None, None),
                "flush": cache.flush,
                "drop_device": cache.drop_device,
                "close": cache.close,
            }
            error = self.in_another(calls[call])
            assert isinstance(error, RuntimeError)
            assert "thread 'another' uses this cache while thread 'MainThread' does" in str(error)
            fam.forward(cache.model, prompt[:, past.get_seq_length() :], past)
        fam.check(cache)
        with cache.session(prompt) as past:
            assert past.cached_tokens == 40

    def test_they_may_take_turns_and_generate_in_another(self, cache: HiCache) -> None:
        prompt = fam.random_tokens(45)
        expected = cache.model.generate(prompt, **GREEDY)

        def generate() -> None:
            with cache.session(prompt) as past:
                outputs: list[torch.Tensor] = []
                # As with a streamer, which is read where the session is.
                assert (
                    self.in_another(
                        lambda: outputs.append(cache.model.generate(prompt, past_key_values=past, **GREEDY))
                    )
                    is None
                )
                assert torch.equal(outputs[0], expected)

        generate()
        assert self.in_another(generate) is None
        generate()
        fam.check(cache)

    @pytest.mark.parametrize("why", ["refused", "fails"])
    def test_a_session_that_could_not_begin_leaves_the_cache_to_others(
        self, cache: HiCache, why: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prompt = fam.random_tokens(45)

        def fail() -> None:
            raise OSError("injected")

        with monkeypatch.context() as patch:
            if why == "fails":
                patch.setattr(cache, "check_weights", fail)
            mask = torch.ones_like(prompt)
            mask[0, 44] = why == "fails"
            with (
                pytest.raises((UnsupportedError, OSError), match=r"injected|padding on the left"),
                cache.session(prompt, attention_mask=mask),
            ):
                pass
        assert self.in_another(lambda: fam.keep(cache, prompt, 40)) is None

    def test_a_session_that_a_thread_left_open_as_it_ended_holds_nobody_up(self, cache: HiCache) -> None:
        prompt = keep_prompt(cache)
        session = cache.session(prompt)
        assert self.in_another(session.__enter__) is None
        with cache.session(prompt) as past:
            assert past.cached_tokens == 40
        session.__exit__(fam.LeftError, fam.LeftError(), None)
        fam.check(cache)
