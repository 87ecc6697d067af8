"""What the planner knows of a device: rates of the bus and of the movers, as measured or by default."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

NEAR_FULL_RATE = 0.95
"""Share of the best rate of the main module that its default number of CTAs reaches."""
DIRECT_CEILING = 0.93
"""Share of a plain copy that SM-driven transfers reach at most (0.92 to 0.94 on an H200): calibration moves so little
that the caches of the CPU hold it, and finds more."""


class Compute(StrEnum):
    """What the model computes while bytes move."""

    PREFILL = "prefill"
    """Matrix products of thousands of tokens, bound by the SMs."""
    DECODE = "decode"
    """Products of few tokens, bound by the device's memory."""
    IDLE = "idle"
    """Nothing that a transfer could disturb."""


def checked_compute(compute: Compute | str | None) -> Compute | None:
    """Return what a model computes as a :class:`Compute`; ValueError if that is neither one nor None."""
    if compute is None or isinstance(compute, Compute):
        return compute
    try:
        return Compute(compute)
    except ValueError:
        raise ValueError(f"compute is {compute!r}; it must be one of {', '.join(Compute)}, or None") from None


@dataclass(frozen=True, slots=True)
class ModelLoss:
    """What a model loses while bytes move: a share of its time, from 0 to 1, on top of what a plain copy takes from it.

    A step that takes 1.25 times as long next to a transfer as next to a plain copy loses 0.2 of its time.

    Attributes
    ----------
    prefill, decode
        By what it computes, :class:`Compute`.
    """

    prefill: float
    decode: float

    def during(self, compute: Compute | None) -> float:
        """Share of its time that a model loses; that of decode steps where it is not known what it computes."""
        if compute is Compute.IDLE:
            return 0.0
        return self.prefill if compute is Compute.PREFILL else self.decode


@dataclass(frozen=True, slots=True)
class DirectionConstants:
    """What the bus and the movers do in one direction.

    Attributes
    ----------
    copy_bytes_per_second
        One large copy between pinned memory and the device.
    batch_copy_seconds, copy_seconds, copy_2d_seconds
        Time the copy engine needs for one more copy on top of its bytes: in a batch, alone, and as a 2-D copy.
    batch_submit_seconds
        Time the caller's thread needs for one more copy of a batch; batches of small copies wait for it.
    width_efficiency
        ``(width, fraction)`` pairs by rising width in bytes: share of the bandwidth that 2-D copies of it reach.
    direct_rates
        ``(ctas, bytes per second)`` pairs by rising CTAs: what the main module moves with that many.
    staged_loss
        What a model loses next to staged transfers.
    direct_losses
        ``(ctas, loss)`` pairs by rising CTAs: what it loses next to direct transfers of so many CTAs.
    """

    copy_bytes_per_second: float
    batch_copy_seconds: float
    batch_submit_seconds: float
    copy_seconds: float
    copy_2d_seconds: float
    width_efficiency: tuple[tuple[int, float], ...]
    direct_rates: tuple[tuple[int, float], ...]
    staged_loss: ModelLoss = ModelLoss(0.0, 0.0)
    direct_losses: tuple[tuple[int, ModelLoss], ...] = ()

    @property
    def default_ctas(self) -> int:
        """Fewest measured CTAs that come near the best rate: each more takes an SM from the model for little."""
        enough = NEAR_FULL_RATE * max(rate for _, rate in self.direct_rates)
        return next(ctas for ctas, rate in self.direct_rates if rate >= enough)

    def loss(self, ctas: int) -> ModelLoss:
        """Loss of a model next to a direct transfer of ``ctas`` CTAs: as next to the next measured number of them."""
        at_least = (loss for measured, loss in self.direct_losses if measured >= ctas)
        return next(at_least, self.direct_losses[-1][1] if self.direct_losses else ModelLoss(0.0, 0.0))

    def efficiency(self, width: int) -> float:
        """Share of the bandwidth of 2-D copies ``width`` bytes wide, by its logarithm between measured widths."""
        before = self.width_efficiency[0]
        for point in self.width_efficiency:
            if width <= point[0]:
                if width <= before[0]:
                    return before[1]
                share = math.log(width / before[0]) / math.log(point[0] / before[0])
                return before[1] + share * (point[1] - before[1])
            before = point
        return before[1]

    def direct_rate(self, ctas: int) -> float:
        """Bytes per second of the main module held to ``ctas`` CTAs, between measured numbers in proportion."""
        below = (0, 0.0)
        for point in self.direct_rates:
            if ctas <= point[0]:
                rate = below[1] + (point[1] - below[1]) * (ctas - below[0]) / (point[0] - below[0])
                break
            below = point
        else:
            rate = below[1]
        return min(rate, DIRECT_CEILING * self.copy_bytes_per_second)


@dataclass(frozen=True, slots=True)
class DeviceConstants:
    """All the planner knows of a device.

    Attributes
    ----------
    source
        Where the figures come from, for messages: "measured on ...", "given by the caller", ...
    write_back, load
        Device to host, host to device.
    launch_seconds
        What one more kernel costs on a busy stream: launch, event, and its first and last rows.
    relayout_bytes_per_second
        Rate of the re-layout and scatter kernels, in bytes of pages.
    batched
        Whether batched copies exist in this runtime.
    has_sms
        Whether the direct path takes SMs from the model; on CPU the faster path is taken, whatever it holds.
    losses_measured
        Whether what a model loses next to transfers was measured on this device; else it is what one loses on an H200.
    """

    source: str
    write_back: DirectionConstants
    load: DirectionConstants
    launch_seconds: float
    relayout_bytes_per_second: float
    batched: bool = True
    has_sms: bool = True
    losses_measured: bool = False

    @property
    def losses_source(self) -> str:
        """Where the shares that a model loses come from, for messages."""
        return "measured on this device" if self.losses_measured else "as on an H200"


_H200_WIDTHS = (
    (512, 0.53),
    (1152, 0.54),
    (2048, 0.61),
    (4096, 0.62),
    (8192, 0.88),
    (16384, 0.945),
    (32768, 0.98),
    (65536, 0.99),
)
H200 = DeviceConstants(
    source="defaults measured on one H200, PCIe 5 x16, 2026-11-29",
    write_back=DirectionConstants(
        copy_bytes_per_second=55.1e9,
        batch_copy_seconds=0.06e-6,
        batch_submit_seconds=0.8e-6,
        copy_seconds=2.5e-6,
        copy_2d_seconds=5.0e-6,
        width_efficiency=_H200_WIDTHS,
        direct_rates=((1, 41.8e9), (2, 51.9e9), (4, 51.9e9), (8, 51.9e9)),
        staged_loss=ModelLoss(0.016, 0.029),
        direct_losses=(
            (1, ModelLoss(0.19, 0.01)),
            (2, ModelLoss(0.47, 0.64)),
            (4, ModelLoss(0.66, 0.79)),
            (8, ModelLoss(0.70, 0.80)),
        ),
    ),
    load=DirectionConstants(
        copy_bytes_per_second=55.2e9,
        batch_copy_seconds=0.06e-6,
        batch_submit_seconds=1.0e-6,
        copy_seconds=2.5e-6,
        copy_2d_seconds=5.0e-6,
        width_efficiency=_H200_WIDTHS,
        direct_rates=((1, 27.6e9), (2, 50.4e9), (4, 52.7e9), (8, 53.4e9)),
        staged_loss=ModelLoss(0.002, 0.027),
        direct_losses=(
            (1, ModelLoss(0.21, 0.002)),
            (2, ModelLoss(0.23, 0.02)),
            (4, ModelLoss(0.32, 0.20)),
            (8, ModelLoss(0.45, 0.36)),
        ),
    ),
    launch_seconds=14e-6,
    relayout_bytes_per_second=1.3e12,
)
"""What a device uses until it is calibrated: figures of the project's design notes; those of direct loads, whose kernel
is newer, of a calibration on 2026-11-30 (the one of the notes made 0.83 of the bus with 2 CTAs, this one 0.92)."""

CPU = DeviceConstants(
    source="device and host are one memory",
    write_back=DirectionConstants(8e9, 0.3e-6, 0.3e-6, 0.3e-6, 0.3e-6, ((1, 1.0),), ((1, 8e9),)),
    load=DirectionConstants(8e9, 0.3e-6, 0.3e-6, 0.3e-6, 0.3e-6, ((1, 1.0),), ((1, 8e9),)),
    launch_seconds=1e-6,
    relayout_bytes_per_second=8e9,
    has_sms=False,
)
"""Rough figures for rows in CPU memory, where staging is one copy too many."""
