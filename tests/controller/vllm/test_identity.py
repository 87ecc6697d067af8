"""The identity of stored blocks: everything that decides their bytes changes it, and the number of blocks does not."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hicache_controller.integrations.vllm import VllmSettings
from hicache_controller.integrations.vllm.identity import fingerprint_of

SETTINGS = VllmSettings(l2_gb=1, storage="file:///l3")


class HfConfig:
    def __init__(self, **values: Any) -> None:
        self.values = values

    def to_dict(self) -> dict[str, Any]:
        return self.values


def config(**changes: Any) -> Any:
    """A configuration as vLLM has it; changes are given as ``part__name=value``."""
    made = SimpleNamespace(
        model_config=SimpleNamespace(
            model="org/model",
            revision="1",
            dtype=torch.bfloat16,
            quantization=None,
            seed=0,
            hf_config=HfConfig(layers=4),
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1, world_size=1, rank=0
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=16, prefix_caching_hash_algo="sha256"),
        load_config=SimpleNamespace(load_format="auto"),
        attention_config="default",
        speculative_config=None,
    )
    for name, value in changes.items():
        part, _, field = name.partition("__")
        setattr(getattr(made, part), field, value) if field else setattr(made, part, value)
    return made


def views(blocks: int = 10, heads: int = 2, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    shape = (2, blocks, 16, heads, 8)
    return {"attention": torch.zeros(shape, dtype=dtype), "states": [torch.zeros(blocks, 4), torch.zeros(blocks, 3, 3)]}


def digest(made: Any = None, seen: Any = None, settings: VllmSettings = SETTINGS, version: str = "0.32.0") -> bytes:
    seen = views() if seen is None else seen
    blocks = seen["states"][0].shape[0]
    return fingerprint_of(made or config(), settings, seen, blocks=blocks, version=version).digest()


def test_the_number_of_blocks_is_no_part_of_it():
    assert digest() == digest(seen=views(blocks=33)) == digest(seen=views(blocks=20))


@pytest.mark.parametrize(
    "changes",
    [
        {"model_config__model": "org/other"},
        {"model_config__revision": "2"},
        {"model_config__dtype": torch.float16},
        {"model_config__quantization": "fp8"},
        {"model_config__hf_config": HfConfig(layers=4, rope_scaling=2)},
        {"cache_config__cache_dtype": "fp8"},
        {"cache_config__block_size": 32},
        {"cache_config__prefix_caching_hash_algo": "xxhash"},
        {"parallel_config__decode_context_parallel_size": 2},
        {"parallel_config__tensor_parallel_size": 2, "parallel_config__world_size": 2},
        {"attention_config": "other"},
        {"speculative_config": SimpleNamespace(method="eagle", model="draft")},
    ],
)
def test_each_part_of_the_configuration_changes_it(changes):
    assert digest(config(**changes)) != digest()


def test_ranks_differ_and_are_named():
    two = {"parallel_config__tensor_parallel_size": 2, "parallel_config__pipeline_parallel_size": 2}
    made = [config(**two, parallel_config__world_size=4, parallel_config__rank=rank) for rank in range(4)]
    found = [fingerprint_of(each, SETTINGS, views(), blocks=10, version="1") for each in made]
    assert [(each.tp_rank, each.pp_rank) for each in found] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert len({each.digest() for each in found}) == 4


def test_shapes_types_and_the_order_of_memory_change_it():
    swapped = views()
    swapped["attention"] = torch.zeros(2, 10, 2, 16, 8, dtype=torch.bfloat16).transpose(2, 3)
    others = (views(heads=4), views(dtype=torch.float16), swapped)
    assert len({digest(), *(digest(seen=each) for each in others)}) == 4


def test_the_version_of_vllm_changes_it():
    assert digest(version="0.33.0") != digest()


def test_weights_without_a_name_are_refused_and_settings_can_name_them():
    unknown = config(model_config__revision=None)
    with pytest.raises(ValueError, match="nothing says which weights 'org/model' has; add revision or weights_hash"):
        digest(unknown)
    named = VllmSettings(l2_gb=1, storage="file:///l3", weights_hash="abc")
    assert digest(unknown, settings=named) != digest()


def test_a_commit_of_a_hub_names_the_weights():
    made = config(model_config__revision=None)
    made.model_config.hf_config._commit_hash = "c0ffee"
    other = copy.deepcopy(made)
    other.model_config.hf_config._commit_hash = "decaf"
    assert digest(made) != digest(other)


def test_other_files_in_a_local_directory_are_other_weights(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    made = config(model_config__revision=None, model_config__model=str(tmp_path))
    before = digest(made)
    (tmp_path / "README.md").write_text("no weights")
    assert digest(made) == before
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    assert digest(made) != before
