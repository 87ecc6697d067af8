"""Hashes and marks of tensors: which weights a model has, across processes and within one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import torch
import xxhash

from .errors import UnsupportedError

_CHUNK = 1 << 22
_STEP = 6364136223846793005
_VERSION, _DTYPE = attrgetter("_version"), attrgetter("dtype")

TensorsMark = tuple[list[int], list[int], list[torch.dtype]]


def weights_hash(model: Any) -> str:
    """Return a digest of all parameters and buffers, computed where they are; any changed bit changes it.

    A 64-bit hash of each tensor, with its name, type and shape. It distinguishes weights; it resists no attacker.

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


def tensor_text(tensor: torch.Tensor) -> str:
    """Return type, shape and a hash of a tensor; any changed bit changes it."""
    factors = _factors(tensor.device, min(_CHUNK, tensor.nbytes // 4 + 4))
    return f"{tensor.dtype}:{tuple(tensor.shape)}:{_tensor_hash(tensor, factors)}"


def tensors_mark(tensors: Sequence[torch.Tensor]) -> TensorsMark:
    """Return what changes when a tensor gets other memory, or is written in a way that autograd notices."""
    try:
        versions = list(map(_VERSION, tensors))
    except RuntimeError:  # inference tensors have none
        versions = [0 if tensor.is_inference() else tensor._version for tensor in tensors]
    return list(map(torch.Tensor.data_ptr, tensors)), versions, list(map(_DTYPE, tensors))


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
