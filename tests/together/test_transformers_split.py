"""Models that compute a prompt in several passes differently from one are refused, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.together import transformers_families as fam
from transformers import (
    BertConfig,
    BertLMHeadModel,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    JambaConfig,
    JambaForCausalLM,
    MoshiConfig,
    MoshiForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
)

from hicache_controller.integrations.transformers import UnsupportedError, split_proof
from hicache_controller.integrations.transformers.model_layout import model_layout
from hicache_controller.integrations.transformers.split_proof import Verdict, cut_prompts, split_verdict

pytestmark = [
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_proof, "_verdicts", {})


def verdict(model: Any, page_size: int = fam.PAGE) -> Verdict:
    return split_verdict(model, model_layout(model), page_size)


def jamba() -> Any:
    options = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_dt_rank": 8}
    return JambaForCausalLM(JambaConfig(**fam.COMMON | {"num_hidden_layers": 4} | options))


def moshi() -> Any:
    return MoshiForCausalLM(
        MoshiConfig(**fam.COMMON | {"head_dim": 16, "ffn_dim": 64, "num_key_value_heads": 4, "sliding_window": 21})
    )


@pytest.fixture(params=[jamba, moshi], ids=["jamba", "moshi"])
def doubtful(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Models that were wrong in every transformers so far, and may be right in one to come."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = request.param().eval()
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.mul_(3)
    return model


def in_two_passes(model: Any, tokens: torch.Tensor, cut: int) -> torch.Tensor:
    past = DynamicCache(config=model.config)
    fam.forward(model, tokens[:, :cut], past)
    return fam.forward(model, tokens[:, cut:], past)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", fam.FAMILIES)
def test_models_that_are_right_are_served_in_every_type(family: str, dtype: torch.dtype) -> None:
    assert verdict(fam.make_model(family, seed=0, dtype=dtype)).reason is None


def test_a_model_that_is_wrong_in_this_transformers_is_refused_and_uncached_where_allowed(
    doubtful: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = fam.random_tokens(61)
    one = fam.forward(doubtful, tokens, DynamicCache(config=doubtful.config))[:, -1]
    apart = max(float((in_two_passes(doubtful, tokens, cut)[:, -1] - one).abs().max()) for cut in (16, 40, 56))
    if apart < 1e-5:
        pytest.skip(f"{type(doubtful).__name__} is right in this transformers")
    with pytest.raises(UnsupportedError, match=r"several passes differently from one: .* check_passes=False"):
        fam.open_cache(doubtful)
    with fam.open_cache(doubtful, on_unsupported="uncached") as cache, cache.session(tokens) as past:
        assert past is None
    assert sum("differently from one" in record.message for record in caplog.records) == 1
    with fam.open_cache(doubtful, check_passes=False) as cache, cache.session(tokens) as past:
        assert past is not None


@pytest.mark.parametrize(
    ("dtype", "size", "refused"),
    [
        (torch.float32, 1e-3, True),
        (torch.float32, 1e-7, False),
        (torch.bfloat16, 0.5, True),
        (torch.bfloat16, 1e-3, False),
        (torch.float16, 0.05, True),
        (torch.float16, 1e-4, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_next"])
def test_what_is_lost_between_passes_counts_where_it_is_more_than_rounding(
    family: str, dtype: torch.dtype, size: float, refused: bool
) -> None:
    model = fam.make_model(family, seed=1, dtype=dtype)
    with fam.wrong_second_passes(model, size):
        reason = verdict(model).reason
    assert (reason is not None) is refused
    if reason is not None:
        assert "the keys of layer 1 differ by" in reason


def test_a_model_that_fails_after_a_prefix_is_refused() -> None:
    model = fam.make_model("llama", seed=1)

    def fail(module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if any(getattr(value, "get_seq_length", int)() > 0 for value in options.values()):
            raise ValueError("injected")

    hook = model.get_decoder().register_forward_pre_hook(fail, with_kwargs=True)
    with pytest.raises(UnsupportedError, match="ValueError: injected"):
        fam.open_cache(model)
    hook.remove()


def test_an_encoder_that_takes_a_cache_is_named_one() -> None:
    options = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    for decoder in (True, False):
        with torch.random.fork_rng():
            model = BertLMHeadModel(BertConfig(vocab_size=fam.VOCABULARY, is_decoder=decoder, **options)).eval()
        if decoder:
            fam.open_cache(model).close()
        else:
            with pytest.raises(UnsupportedError, match="depend on the tokens that follow, as in an encoder"):
                fam.open_cache(model)


def count_each_pass(first: int) -> Any:
    """Make a hook with which a decoder counts the positions of every pass from ``first`` unless it is given them."""

    def count(module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if options.get("position_ids") is None:
            tokens = arguments[0] if arguments else options["input_ids"]
            return arguments, options | {"position_ids": first + torch.arange(tokens.shape[1])[None]}
        return None

    return count


def test_a_model_that_counts_positions_from_each_pass_is_given_them(harmless_hooks: None) -> None:
    model = fam.make_model("llama", seed=1)
    count_from_zero = count_each_pass(0)
    prompt = fam.random_tokens(45)
    one = fam.forward(model, prompt, DynamicCache(config=model.config))
    hook = model.get_decoder().register_forward_pre_hook(count_from_zero, with_kwargs=True)
    assert verdict(model) == Verdict(None, needs_positions=True)
    hook.remove()
    with fam.open_cache(model) as cache:
        assert cache.needs_positions
        for begin in (0, 40):
            with cache.session(prompt) as past:
                assert past.cached_tokens == begin
                hook = model.get_decoder().register_forward_pre_hook(count_from_zero, with_kwargs=True)
                fam.forward(model, prompt[:, begin:43], past)
                torch.testing.assert_close(fam.forward(model, prompt[:, 43:], past), one[:, 43:])
                hook.remove()


def test_positions_that_a_model_would_not_count_by_itself_are_not_given_to_it() -> None:
    # Learned ones, as those of rotations are relative.
    model = GPT2LMHeadModel(GPT2Config(vocab_size=fam.VOCABULARY, n_embd=32, n_layer=2, n_head=4)).eval()
    hook = model.get_decoder().register_forward_pre_hook(count_each_pass(2), with_kwargs=True)
    assert verdict(model).reason is not None
    hook.remove()


def test_a_model_that_counts_positions_after_its_padding_token_is_served() -> None:
    options = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.random.fork_rng():
        config = RobertaConfig(vocab_size=12, is_decoder=True, pad_token_id=1, **options)
        model = RobertaForCausalLM(config).eval()
    assert verdict(model) == Verdict()


def test_a_configuration_is_proved_once_for_each_type() -> None:
    model = fam.make_model("llama", seed=1)
    passes: list[int] = []
    hook = model.get_decoder().layers[1].register_forward_hook(lambda *_: passes.append(1))
    counts = []
    for dtype in (torch.float32, torch.float32, torch.bfloat16, torch.float32, torch.bfloat16):
        model.to(dtype)
        layout = model_layout(model)
        passes.clear()
        split_verdict(model, layout, fam.PAGE)
        counts.append(len(passes))
    hook.remove()
    assert counts[0] == counts[2] > 0
    assert counts[1] == counts[3] == counts[4] == 0


@pytest.mark.parametrize("family", ["llama", "mistral", "falcon_h1"])
def test_the_model_and_the_random_state_are_left_as_they_were(family: str) -> None:
    model = fam.make_model(family, seed=1)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            # As of a model that draws numbers in its forward pass.
            module.register_forward_hook(lambda *_: torch.rand(1) and None)
    layout = model_layout(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state, hooks = torch.get_rng_state(), [len(module._forward_hooks) for module in model.modules()]
    split_verdict(model, layout, fam.PAGE)
    assert torch.equal(torch.get_rng_state(), state)
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(weights.grad is None for weights in model.parameters())


def test_training_mode_is_an_error_that_says_so() -> None:
    model = fam.make_model("llama", seed=1).train()
    with pytest.raises(RuntimeError, match=r"training mode, .* call model.eval\(\)"):
        fam.open_cache(model)


def test_a_model_without_weights_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="on the meta device"):
        fam.open_cache(fam.make_model("llama", seed=1, device="meta"))


@pytest.mark.parametrize("page_size", [1, 8, 16, 64, 256, 1000])
@pytest.mark.parametrize("reach", [0, 21, 512, 4096])
def test_prompts_are_cut_at_pages_inside_pages_and_after_windows(page_size: int, reach: int) -> None:
    chains = cut_prompts(page_size, reach, 1 << 30)
    assert len({chain[-1] for chain in chains}) == 1
    for chain in chains:
        assert list(chain) == sorted(set(chain))
    near, far = chains
    page = min(256, max(16, page_size)) if page_size != 1000 else 256
    assert near[0] % page == 0
    assert near[1] % page
    assert far[0] > reach
    assert far[0] % page == 0
    assert far[-1] <= max(2 * page, reach + page) + page


def test_no_prompt_is_longer_than_the_model_takes() -> None:
    for limit in (1, 5, 17, 30, 45):
        assert {chain[-1] for chain in cut_prompts(8, 21, limit)} == {min(limit, 45)}
