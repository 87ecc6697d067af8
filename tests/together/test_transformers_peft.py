"""Adapters of peft: each state of each kind finds its own prefix and no other's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from tests.together import transformers_families as fam  # noqa: E402
from tests.together.transformers_served import hit  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("one_thread"),
]
TOKENS = 43
CACHED = 40
KEYS = ["q_proj", "k_proj", "v_proj"]
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "LoraConfig": {"r": 4, "target_modules": KEYS, "init_lora_weights": False},
    "IA3Config": {"target_modules": KEYS, "feedforward_modules": [], "init_ia3_weights": False},
    "LoHaConfig": {"target_modules": KEYS, "init_weights": False},
    "LoKrConfig": {"target_modules": KEYS, "init_weights": False},
    "OFTConfig": {"target_modules": KEYS, "oft_block_size": 4, "init_weights": False},
    "BOFTConfig": {"target_modules": KEYS, "boft_block_size": 4, "init_weights": False},
    "VeraConfig": {"target_modules": ["q_proj", "o_proj"], "r": 4, "init_weights": False},
    "FourierFTConfig": {"target_modules": KEYS, "n_frequency": 8, "init_weights": False},
    "HRAConfig": {"target_modules": KEYS, "init_weights": False},
}
OF_TOKENS = {
    "PromptTuningConfig": {"num_virtual_tokens": 4},
    "PromptEncoderConfig": {"num_virtual_tokens": 4, "encoder_hidden_size": 16},
}


def adapted(kind: str, *names: str) -> Any:
    """Make a model with adapters whose weights are drawn at random, equal ones each time."""
    if not hasattr(peft, kind):
        pytest.skip(f"peft {peft.__version__} has no {kind}")

    def make() -> Any:
        options = CONFIGURATIONS.get(kind) or OF_TOKENS[kind] | {"task_type": "CAUSAL_LM"}
        return getattr(peft, kind)(**options)

    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = peft.get_peft_model(fam.make_model("llama", seed=1), make(), adapter_name=names[0])
        for name in names[1:]:
            model.add_adapter(name, make())
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if any(f".{each}" in name for each in names):
                    weight.add_(torch.randn(weight.shape) * 0.3)
    model.set_adapter(names[0])
    return model.eval()


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_each_state_finds_its_own_prefix_and_no_other(kind: str) -> None:
    model, prompt = adapted(kind, "one"), fam.random_tokens(TOKENS)
    with fam.open_cache(model) as cache:
        assert not cache.read_settings().private
        assert [hit(cache, prompt) for _ in range(2)] == [0, CACHED]
        with model.disable_adapter():
            assert [hit(cache, prompt) for _ in range(2)] == [0, CACHED]
        assert hit(cache, prompt) == CACHED
        model.merge_adapter()
        try:
            cached = hit(cache, prompt)
        except RuntimeError:
            cached = 0  # Some kinds replace the weights, which is refused.
            with pytest.raises(RuntimeError, match="weights were changed"):
                cache.check_weights()
        assert cached == 0


@pytest.mark.parametrize("kind", ["LoraConfig", "IA3Config", "LoHaConfig"])
def test_a_switch_of_adapters_is_a_switch_of_prefixes(kind: str, tmp_path: Path) -> None:
    prompt, fingerprints = fam.random_tokens(TOKENS), []
    for first, second in (("one", "two"), ("two", "one"), ("one", "two")):
        model = adapted(kind, "one", "two")
        model.set_adapter(first)
        with fam.open_cache(model, storage=tmp_path) as cache:
            fingerprints.append(cache.fingerprint)
            expected = CACHED if len(fingerprints) == 3 else 0
            assert hit(cache, prompt) == expected
            model.set_adapter(second)
            assert hit(cache, prompt) == expected
            model.set_adapter(first)
            assert hit(cache, prompt) == CACHED
    assert fingerprints[0] == fingerprints[2] != fingerprints[1]


def test_a_scale_is_part_of_it() -> None:
    model, prompt = adapted("LoraConfig", "one"), fam.random_tokens(TOKENS)
    with fam.open_cache(model) as cache:
        assert hit(cache, prompt) == 0
        for module in model.modules():
            if hasattr(module, "set_scale"):
                module.set_scale("one", 4.0)
        assert [hit(cache, prompt) for _ in range(2)] == [0, CACHED]


def test_adapters_chosen_for_one_pass_are_seen() -> None:
    model, prompt = adapted("LoraConfig", "one", "two"), fam.random_tokens(TOKENS)
    with fam.open_cache(model) as cache:
        assert hit(cache, prompt, adapter_names=["two"]) == 0
        assert cache.stats().device_tokens == 0
        assert [hit(cache, prompt) for _ in range(2)] == [0, CACHED]
        with cache.session(prompt) as past, pytest.raises(ValueError, match="_forward_pre_hooks than the session"):
            fam.forward(model, prompt[:, past.cached_tokens :], past, adapter_names=["two"])


@pytest.mark.parametrize("kind", OF_TOKENS)
def test_what_follows_virtual_tokens_is_not_kept(kind: str) -> None:
    model, prompt = adapted(kind, "one"), fam.random_tokens(TOKENS)
    with fam.open_cache(model) as cache:
        assert [hit(cache, prompt) for _ in range(2)] == [0, 0]
        with model.disable_adapter():
            assert [hit(cache, prompt) for _ in range(2)] == [0, CACHED]
        assert hit(cache, prompt) == 0


@pytest.mark.parametrize("change", ["set_adapter", "disable_adapters"])
def test_adapters_of_transformers_are_seen(change: str) -> None:
    model, prompt = fam.make_model("llama", seed=1), fam.random_tokens(TOKENS)
    try:
        for name in ("one", "two"):
            model.add_adapter(peft.LoraConfig(**CONFIGURATIONS["LoraConfig"]), adapter_name=name)
    except ValueError as error:
        pytest.skip(str(error))
    model.set_adapter("one")
    model.eval()
    changes: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "set_adapter": (lambda: model.set_adapter("two"), lambda: model.set_adapter("one")),
        "disable_adapters": (model.disable_adapters, model.enable_adapters),
    }
    with fam.open_cache(model) as cache:
        assert [hit(cache, prompt) for _ in range(2)] == [0, CACHED]
        changes[change][0]()
        assert [hit(cache, prompt) for _ in range(2)] == [0, CACHED]
        changes[change][1]()
        assert hit(cache, prompt) == CACHED
