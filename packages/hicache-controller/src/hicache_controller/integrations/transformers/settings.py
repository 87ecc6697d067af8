"""Settings: what decides a model's keys and values apart from tokens and weights, and whether it was changed.

That is every attribute of its modules and classes with what it holds, forward hooks, and replaced forward methods, of
which adapters of every kind consist; and ``torch.autocast`` and the precision of matrix products.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
import xxhash

from .describe import Description
from .model_layout import decoder_of
from .weights import TensorsMark, tensors_mark

_END = object()
_MERGED = "merged"
"""Part of the names of attributes that say which adapters were merged into the weights, which autograd does not see."""


@dataclass(frozen=True, eq=False)
class Settings:
    """The settings of a model at one time.

    Attributes
    ----------
    texts
        Each setting by its name.
    digest
        Of all texts.
    private
        Names of settings that another process cannot be known to have; the digest is equal in none.
    training
        Name of a module that is in training mode, or None.
    autocast
        Type that ``torch.autocast`` computes in, or None.
    """

    texts: Mapping[str, str]
    digest: bytes
    private: tuple[str, ...]
    training: str | None
    autocast: torch.dtype | None

    def difference(self, other: Settings) -> str | None:
        """Name a setting in which they differ; None where they are equal."""
        if self.digest == other.digest:
            return None
        names = self.texts.keys() | other.texts.keys()
        return min(name for name in names if self.texts.get(name) != other.texts.get(name))


class SettingsWatch:
    """Reads the settings of a model. As long as every attribute is the same object as before, nothing is described.

    What was read is held until the next description, so that no other object gets the identity of one that is gone.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._decoder = decoder_of(model)
        self._device_type = model.device.type
        self._process = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._identified: dict[int, tuple[Any, int]] = {}
        self._merges = 0
        self._around = self._surroundings()
        self._describe()
        self._settings = self._make_settings()

    def read(self) -> Settings:
        """Return the settings as they are now: the same object as long as they stay."""
        around = self._surroundings()
        changed = not self._holds()
        if changed or around != self._around:
            self._around = around
            if changed:
                merged = _merged(self._description)
                self._describe()
                self._merges += _merged(self._description) != merged
            self._settings = self._make_settings()
        return self._settings

    def weights_mark(self) -> TensorsMark:
        """Return what changes when a weight is replaced, or written in a way that autograd notices.

        Weights that are gone keep their memory until the next description, so that no new one gets it.
        """
        return tensors_mark(self._all_weights())

    def _all_weights(self) -> list[torch.Tensor]:
        return [each for each in itertools.chain.from_iterable(self._description.weights) if each is not None]

    def _holds(self) -> bool:
        """Return whether the description still holds."""
        found = self._description
        if any(found.empty) or self._counts != (list(map(len, found.sized)), list(map(type, found.modules))):
            return False
        try:
            return all(map(is_, _parts(found), self._seen)) and tensors_mark(found.tensors) == self._marks
        except KeyError:  # an attribute is gone
            return False

    def _describe(self) -> None:
        known, self._identified = self._identified, {}

        def identify(value: Any) -> str:
            if id(value) not in self._identified:
                self._identified[id(value)] = known.get(id(value)) or (value, next(self._numbers))
            return f"{self._process}-{self._identified[id(value)][1]}"

        self._description = found = Description(self._model, self._decoder, identify)
        self._counts = list(map(len, found.sized)), list(map(type, found.modules))
        self._weights = self._all_weights()
        self._seen = list(_parts(found))
        self._marks = tensors_mark(found.tensors)

    def _make_settings(self) -> Settings:
        found, (autocast, precision) = self._description, self._around
        texts = found.texts | {"torch.autocast": str(autocast), "torch.float32_matmul_precision": precision}
        if self._merges:
            # Taken out of the weights again, adapters leave what rounding left.
            texts[_MERGED] = f"{self._process}-{self._merges}"
        text = "\n".join(f"{name}: {texts[name]}" for name in sorted(texts))
        digest = xxhash.xxh3_128_digest(text.encode())
        return Settings(texts, digest, tuple(found.private), found.training, autocast)

    def _surroundings(self) -> tuple[torch.dtype | None, str]:
        on = torch.is_autocast_enabled(self._device_type)
        return torch.get_autocast_dtype(self._device_type) if on else None, torch.get_float32_matmul_precision()


def _parts(description: Description) -> Iterator[Any]:
    """Yield every object that the texts of a description depend on."""
    read = (map(reader, targets) for reader, targets in description.readers.items())
    return itertools.chain(itertools.chain.from_iterable(itertools.chain(description.views, *read)), (_END,))


def _merged(description: Description) -> dict[str, str]:
    return {name: text for name, text in description.texts.items() if _MERGED in name.rpartition(".")[2]}
