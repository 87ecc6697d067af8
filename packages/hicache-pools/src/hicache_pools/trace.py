"""Request traces in the Mooncake format, as far as the fragmentation report needs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from hicache_kernels.command_line import numbered_lines


class TraceRequest(NamedTuple):
    """One request of a trace: its time in milliseconds and the ids of its prompt's blocks."""

    timestamp: int
    blocks: tuple[int, ...]


def read_trace(path: str | Path, limit: int | None = None) -> list[TraceRequest]:
    """Read what a replay of allocations needs of a trace in the Mooncake format; other fields of a line are ignored.

    Parameters
    ----------
    path
        File whose lines are JSON objects with ``timestamp`` (ms) and ``hash_ids`` (one id a block).
    limit
        Most requests to read; None for all.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        Naming the first line that is not such an object.
    """
    requests: list[TraceRequest] = []
    for number, line in numbered_lines(Path(path)):
        if limit is not None and len(requests) >= limit:
            break
        try:
            record = json.loads(line)
            requests.append(TraceRequest(int(record["timestamp"]), tuple(map(int, record["hash_ids"]))))
        except (KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: no object with timestamp and hash_ids: {error!r}") from None
    return requests
