"""Agreement: lets the ranks of a torch.distributed group act on the same numbers, and survive a dead rank."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed

from hicache_kernels.validation import seconds

from .metrics import Metrics

logger = logging.getLogger(__name__)


class Agreement:
    """Element-wise minima over the ranks of a group.

    All ranks must ask in the same order, as ranks that schedule the same requests do.

    Parameters
    ----------
    group
        A process group with CPU tensors (gloo), or None for a rank of its own.
    timeout
        Seconds after which a rank that does not answer counts as dead. From then on this rank asks no other and
        every answer is zero: nothing is shared with ranks whose state is not known.
    metrics
        Where to count.
    """

    def __init__(self, group: Any, *, timeout: float, metrics: Metrics) -> None:
        timeout = seconds("distributed_timeout", timeout, above=True)
        self._group = group
        self._ranks = 1 if group is None else torch.distributed.get_world_size(group)
        self._timeout = datetime.timedelta(seconds=timeout)
        self._metrics = metrics
        self.broken = False

    @property
    def needed(self) -> bool:
        """Whether there are other ranks to agree with."""
        return self._ranks > 1

    def smallest(self, values: Sequence[int]) -> list[int]:
        """Minimum of each value over all ranks; zeros once a rank is lost."""
        if not self.needed:
            return list(values)
        if not self.broken:
            shared = torch.tensor(list(values), dtype=torch.int64)
            try:
                work = torch.distributed.all_reduce(
                    shared, torch.distributed.ReduceOp.MIN, group=self._group, async_op=True
                )
                if work is not None:
                    work.wait(self._timeout)
                return [int(value) for value in shared.tolist()]
            except Exception:
                self.broken = True
                self._metrics.count("lost_ranks")
                logger.exception("a rank did not answer within %s; storage hits count as 0 from now on", self._timeout)
        return [0] * len(values)
