"""The fingerprint of a model: what its stored keys and values belong to."""

from __future__ import annotations

from typing import Any

from ...storage import Fingerprint
from .settings import SettingsWatch
from .weights import weights_hash


def model_fingerprint(model: Any, model_id: str, *, revision: str | None, page_size: int) -> Fingerprint:
    """Return what a model's cached bytes belong to: its id and revision, weights, dtype and settings.

    Settings that another process cannot be known to have make it a fingerprint that no other cache has.
    """
    return Fingerprint(
        model_id,
        revision=revision,
        weights_hash=weights_hash(model),
        extra=(
            ("dtype", str(model.dtype)),
            ("engine", "transformers"),
            ("page_size", str(page_size)),
            ("settings", SettingsWatch(model).read().digest.hex()),
        ),
    )
