"""What makes a model's cached bytes its own: a fingerprint of weights, dtype and configuration, and a guard on both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
import xxhash

from ...storage.fingerprint import Fingerprint
from .errors import UnsupportedError

_CHUNK = 1 << 24
_IRRELEVANT = frozenset(
    {"transformers_version", "use_cache", "architectures", "output_attentions", "output_hidden_states"}
)
"""Fields of a configuration that change no key or value."""


def weights_hash(model: Any) -> str:
    """Return a digest of all parameters and buffers, computed where they are; any changed bit changes it.

    A polynomial hash modulo 2**64 of the bytes of each tensor; it tells weights apart and resists no attacker.

    Raises
    ------
    UnsupportedError
        If some weights are on the meta device, as those of an offloaded model are.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in _weights(model):
        if tensor.device.type == "meta":
            raise UnsupportedError(f"{name} is on the meta device, so the weights have no hash; pass revision")
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}:{_tensor_hash(tensor)};".encode())
    return digest.hexdigest()


def model_fingerprint(model: Any, model_id: str, *, revision: str | None, page_size: int) -> Fingerprint:
    """Return what a model's cached bytes belong to: its id and revision, weights, dtype, attention, configuration."""
    config = _configuration(model.config)
    text = json.dumps(config, sort_keys=True, default=str)
    return Fingerprint(
        model_id,
        revision=revision,
        weights_hash=weights_hash(model),
        extra=(
            ("attention", str(model.config._attn_implementation)),
            ("configuration", xxhash.xxh3_128_hexdigest(text.encode())),
            ("dtype", str(model.dtype)),
            ("engine", "transformers"),
            ("page_size", str(page_size)),
        ),
    )


def weights_mark(model: Any) -> int:
    """Return a number that changes when a parameter is replaced, or written in a way that autograd notices."""
    return hash(tuple((tensor.data_ptr(), _version(tensor), tensor.dtype) for _, tensor in _weights(model)))


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else int(tensor._version)


def _weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _tensor_hash(tensor: torch.Tensor) -> int:
    """Hash the bytes of a tensor; of equally many bytes, no two that differ in one place have the same."""
    with torch.no_grad():
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        whole = data.numel() // 4 * 4
        words = [data[:whole].view(torch.int32), data[whole:]]
        total = torch.zeros((), dtype=torch.int64, device=data.device)
        for part in words:
            for begin in range(0, part.numel(), _CHUNK):
                chunk = part[begin : begin + _CHUNK].to(torch.int64)
                # Odd factors, so that no single difference is multiplied away modulo 2**64.
                factors = torch.arange(begin, begin + chunk.numel(), device=data.device) * 2 + 1
                total = total * 6364136223846793005 + (chunk * factors * 2654435761).sum()
    return int(total)


def _configuration(config: Any) -> dict[str, Any]:
    return {
        name: value for name, value in config.to_dict().items() if name not in _IRRELEVANT and not name.startswith("_")
    }
