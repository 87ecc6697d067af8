"""The identity of a model's blocks in storage: all that decides their bytes, apart from tokens; needs no vLLM."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from ...storage import Fingerprint
from ..weight_files import directory_hash
from .settings import VllmSettings

View = torch.Tensor | list[torch.Tensor]
"""What a layer keeps: a tensor, or several states."""


def fingerprint_of(
    config: Any, settings: VllmSettings, views: Mapping[str, View], *, blocks: int, version: str
) -> Fingerprint:
    """Describe the blocks of one worker.

    Parameters
    ----------
    config
        vLLM's configuration.
    settings
        Of the connector.
    views
        The worker's tensors by layer, as vLLM registers them.
    blocks
        Number of blocks in each of them, which is no part of the identity.
    version
        Of vLLM: what lies in a block may change with it.

    Raises
    ------
    ValueError
        Where nothing says which weights the model has.
    """
    model, parallel = config.model_config, config.parallel_config
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    rank = parallel.rank
    extra = {
        "vllm": version,
        "model_config": _config_text(model.hf_config),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_dtype": str(config.cache_config.cache_dtype),
        "block_size": str(config.cache_config.block_size),
        "hash": str(config.cache_config.prefix_caching_hash_algo),
        "context_parallel": f"{parallel.decode_context_parallel_size} of {parallel.world_size}, rank {rank}",
        "attention": str(getattr(config, "attention_config", None)),
        "speculative": _speculation_text(config.speculative_config),
        "load": f"{config.load_config.load_format} {model.seed if config.load_config.load_format == 'dummy' else ''}",
        "views": _views_text(views, blocks),
    }
    revision = settings.revision or model.revision or getattr(model.hf_config, "_commit_hash", None)
    weights = settings.weights_hash
    if revision is None and weights is None:
        weights = directory_hash(model.model)
    if revision is None and weights is None:
        raise ValueError(
            f"storage is {settings.storage!r}, but nothing says which weights {model.model!r} has; add revision or "
            "weights_hash to kv_connector_extra_config"
        )
    return Fingerprint(
        str(model.model),
        revision=revision,
        weights_hash=weights,
        tp_rank=rank % tp,
        tp_size=tp,
        pp_rank=rank // tp % pp,
        pp_size=pp,
        extra=tuple(sorted(extra.items())),
    )


def _config_text(hf_config: Any) -> str:
    text = json.dumps(hf_config.to_dict(), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _speculation_text(speculation: Any) -> str:
    return "" if speculation is None else f"{speculation.method} {speculation.model}"


def _views_text(views: Mapping[str, View], blocks: int) -> str:
    """Describe shapes, types and order of memory, without the number of blocks."""
    lines = []
    for name, view in sorted(views.items()):
        parts = [view] if isinstance(view, torch.Tensor) else view
        lines += [f"{name} {part.dtype} {_shape(part, blocks)}" for part in parts]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _shape(view: torch.Tensor, blocks: int) -> str:
    """Describe each dimension by its extent, a block's where it counts blocks, and by its place in memory."""
    order = sorted(range(view.dim()), key=view.stride, reverse=True)
    extents = [str(extent) if extent % blocks else f"{extent // blocks} a block" for extent in view.shape]
    return ", ".join(f"{extent} at {order.index(dim)}" for dim, extent in enumerate(extents))
