"""What makes a model's cached bytes its own: a fingerprint of weights, dtype and configuration, and a guard on both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import torch
import xxhash

from ...storage.fingerprint import Fingerprint
from .errors import UnsupportedError

_CHUNK = 1 << 22
_STEP = 6364136223846793005
_IRRELEVANT = frozenset(
    {"transformers_version", "use_cache", "architectures", "output_attentions", "output_hidden_states"}
)
"""Fields of a configuration that change no key or value."""


def weights_hash(model: Any) -> str:
    """Return a digest of all parameters and buffers, computed where they are; any changed bit changes it.

    A 64-bit hash of each tensor, with its name, type and shape; it tells weights apart and resists no attacker.

    Raises
    ------
    UnsupportedError
        If some weights are on the meta device, as those of an offloaded model are.
    """
    digest = xxhash.xxh3_128()
    # In order of their names: modules may register buffers in an order that differs from process to process.
    weights = sorted(_weights(model), key=itemgetter(0))
    most = min(_CHUNK, max((tensor.nbytes // 4 for _, tensor in weights), default=0) + 4)
    factors: dict[torch.device, torch.Tensor] = {}
    for name, tensor in weights:
        if tensor.device.type == "meta":
            raise UnsupportedError(f"{name} is on the meta device; a storage needs the weights in memory, to hash them")
        if tensor.device not in factors:
            factors[tensor.device] = _factors(tensor.device, most)
        value = _tensor_hash(tensor, factors[tensor.device])
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}:{value};".encode())
    return digest.hexdigest()


def model_fingerprint(model: Any, model_id: str, *, revision: str | None, page_size: int) -> Fingerprint:
    """Return what a model's cached bytes belong to: its id and revision, weights, dtype, attention, configuration."""
    config = _configuration(model.config)
    text = json.dumps(config, sort_keys=True, default=_plain)
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
    # Every session pays for this: one pass over the modules, and no names.
    marks = [
        (tensor.data_ptr(), _version(tensor), tensor.dtype)
        for module in model.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    ]
    return hash(tuple(marks))


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # inference tensors have none
        return 0


def _weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _tensor_hash(tensor: torch.Tensor, factors: torch.Tensor) -> int:
    """Hash the bytes of a tensor: sums of its 32-bit words times random odd numbers, modulo 2**64."""
    with torch.no_grad():
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        whole = data.numel() // 4 * 4
        words = [data[:whole].view(torch.int32), data[whole:]]
        total = torch.zeros((), dtype=torch.int64, device=data.device)
        for part in words:
            for begin in range(0, part.numel(), _CHUNK):
                chunk = part[begin : begin + _CHUNK].to(torch.int64)
                total = total * _STEP + (chunk * factors[: chunk.numel()]).sum()
    return int(total)


def _factors(device: torch.device, count: int) -> torch.Tensor:
    """Make the same random odd numbers on every device: an integer mixer (SplitMix64) of 1, 2, 3, ..."""
    mixed = torch.arange(1, count + 1, device=device) * -7046029254386353131
    for shift, multiplier in ((30, -4658895280553007687), (27, -7723592293110705685)):
        # Shifts of signed numbers bring in the sign; the mask takes it out.
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * multiplier
    return mixed | 1


def _configuration(config: Any) -> dict[str, Any]:
    return {
        name: value for name, value in config.to_dict().items() if name not in _IRRELEVANT and not name.startswith("_")
    }


def _plain(value: Any) -> Any:
    """Turn what JSON does not know into what is the same in every process."""
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)
