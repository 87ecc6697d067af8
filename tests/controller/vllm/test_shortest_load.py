"""From how many tokens on a load pays."""

import random

import pytest

from hicache_controller.integrations.vllm.shortest_load import (
    LOAD_BYTES_PER_SECOND,
    LOAD_FIXED_SECONDS,
    GroupBytes,
    shortest_load,
)


def load_seconds(tokens: int, token_bytes: float) -> float:
    return LOAD_FIXED_SECONDS + tokens * token_bytes / LOAD_BYTES_PER_SECOND


def test_the_shortest_load_pays_and_one_token_less_does_not():
    numbers = random.Random()
    for _ in range(200):
        block = numbers.choice([16, 32, 64])
        groups = [GroupBytes(block, numbers.randrange(1, 1 << 20)) for _ in range(numbers.randrange(1, 4))]
        token_bytes = sum(group.block_bytes for group in groups) / block
        rate = numbers.uniform(0.01, 0.95) * LOAD_BYTES_PER_SECOND / token_bytes
        tokens = shortest_load(groups, rate)
        assert load_seconds(tokens, token_bytes) <= tokens / rate * (1 + 1e-9)
        less = tokens - 1
        assert less == 0 or load_seconds(less, token_bytes) > less / rate * (1 - 1e-9)


def test_an_8b_model_loads_from_160_tokens_on_and_a_slower_engine_earlier():
    groups = [GroupBytes(16, 2 << 20)]
    assert shortest_load(groups, 36_000) == 160
    assert shortest_load(groups, 3_600) < 20


def test_a_bus_that_is_slower_than_the_model_is_an_error_that_names_the_settings():
    message = r"prefill_tokens_per_second is 36000, .* 2000000 bytes, .* less than 25000, or give min_load_tokens"
    with pytest.raises(ValueError, match=message):
        shortest_load([GroupBytes(16, 32 * 10**6)], 36_000)


@pytest.mark.parametrize("rate", [0, -1.0, float("nan"), float("inf"), "fast"])
def test_a_speed_that_is_none_is_refused_by_name(rate):
    with pytest.raises((TypeError, ValueError), match="prefill_tokens_per_second"):
        shortest_load([GroupBytes(16, 1)], rate)
