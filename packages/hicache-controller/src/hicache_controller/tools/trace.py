"""Request traces: reading them with every fault named, and making them.

A trace is JSON lines, one request each: ``timestamp`` (ms), ``input_length`` and ``output_length`` (tokens) and
``hash_ids``, one id for each block of :data:`BLOCK_TOKENS` input tokens, the last one possibly incomplete; equal ids at
equal positions mean an equal prefix. The format is that of the Mooncake trace (Qin et al., FAST '25).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from hicache_kernels.command_line import numbered_lines

BLOCK_TOKENS = 512
"""Tokens of a block, which a hash id of a trace names."""

_MAX_TURNS = 10**7
"""Of a trace that is made, earlier turns counted again in every request that has them."""

_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


class TraceError(ValueError):
    """A fault in a trace: names the file, the line and what is wrong with it."""


class TraceRequest(NamedTuple):
    """One request of a trace.

    Attributes
    ----------
    timestamp
        Arrival, milliseconds since the trace's start.
    input_length, output_length
        Tokens.
    hash_ids
        One id a block of the input.
    """

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    @property
    def blocks(self) -> tuple[int, ...]:
        """Ids of the complete blocks: what a prefix cache can share."""
        return self.hash_ids[: self.input_length // BLOCK_TOKENS]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def parse_request(text: str) -> TraceRequest:
    """One line of a trace.

    Raises
    ------
    ValueError
        Naming the fault; the caller knows file and line.
    """
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON (column {error.colno}: {error.msg})") from None
    except (RecursionError, ValueError):
        raise ValueError("not JSON of a sensible depth and of sensible numbers") from None
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__} where an object is expected")
    for field in _FIELDS:
        if field not in record:
            raise ValueError(f"no field {field!r}")
    for field in _FIELDS[:3]:
        value = record[field]
        if isinstance(value, float) and value.is_integer():
            value = record[field] = int(value)
        if not _is_count(value):
            raise ValueError(f"{field} is {value!r}; a whole number from 0 to 2**63 - 1 is expected")
    ids = record["hash_ids"]
    if not isinstance(ids, list) or not all(map(_is_count, ids)):
        raise ValueError("hash_ids is not a list of whole numbers from 0 to 2**63 - 1")
    expected = -(-record["input_length"] // BLOCK_TOKENS)
    if len(ids) != expected:
        raise ValueError(
            f"{len(ids)} hash_ids for an input_length of {record['input_length']}; {expected} are expected, "
            f"one for each {BLOCK_TOKENS} tokens"
        )
    return TraceRequest(record["timestamp"], record["input_length"], record["output_length"], tuple(ids))


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Read the first ``limit`` requests of a trace (all with None); blank lines are passed over.

    Raises
    ------
    TraceError
        Naming file, line number and fault of the first malformed line, or that there is no request.
    OSError
        Where the file cannot be read.
    """
    requests: list[TraceRequest] = []
    try:
        for number, line in numbered_lines(path):
            if limit is not None and len(requests) >= limit:
                break
            if line.strip():
                requests.append(_request(line, path, number))
    except TraceError:
        raise
    except ValueError as error:
        raise TraceError(str(error)) from None
    if not requests:
        raise TraceError(f"{path}: no requests in it")
    return requests


def _request(line: bytes, path: Path, number: int) -> TraceRequest:
    try:
        return parse_request(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise TraceError(f"{path}, line {number}: not UTF-8") from None
    except ValueError as error:
        raise TraceError(f"{path}, line {number}: {error}") from None


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write a trace, one JSON object a line."""
    with path.open("w", encoding="utf-8") as out:
        for request in requests:
            out.write(json.dumps(request._asdict()) + "\n")


def make_trace(
    requests: int, *, seed: int = 0, system_prompts: int = 8, turns: int = 6, mean_turn_tokens: int = 1200
) -> list[TraceRequest]:
    """Make a trace of many-turn chats that share system prompts.

    Conversations start and interleave at random. Each turn's input is the whole conversation so far (system prompt,
    earlier inputs and answers) and a new user message, as a chat service sees it.

    Parameters
    ----------
    requests
        Number of requests.
    seed
        Equal seeds make equal traces.
    system_prompts
        Number of distinct system prompts; popular ones are picked more often.
    turns
        Mean number of turns of a conversation.
    mean_turn_tokens
        Mean length of a user message in tokens.

    Raises
    ------
    ValueError
        Naming the number that is out of range.
    """
    for name, value, largest in (
        ("requests", requests, _MAX_TURNS),
        ("system_prompts", system_prompts, 10**5),
        ("turns", turns, 10**4),
        ("mean_turn_tokens", mean_turn_tokens, 10**5),
    ):
        if not 0 < value <= largest:
            raise ValueError(f"{name} is {value}; accepted is 1 to {largest}")
    if requests * turns > _MAX_TURNS:
        raise ValueError(f"requests is {requests} and turns {turns}; accepted is a product of at most {_MAX_TURNS}")
    return list(_chats(requests, random.Random(seed), system_prompts, turns, mean_turn_tokens))


def _chats(
    requests: int, rng: random.Random, system_prompts: int, turns: int, mean_turn_tokens: int
) -> Iterator[TraceRequest]:
    prompt_tokens = [rng.randint(1, 6) * BLOCK_TOKENS for _ in range(system_prompts)]
    popularity = [1 / (rank + 1) for rank in range(system_prompts)]
    next_id = 0

    def fresh(count: int) -> list[int]:
        nonlocal next_id
        next_id += count
        return list(range(next_id - count, next_id))

    prompt_blocks = [fresh(tokens // BLOCK_TOKENS) for tokens in prompt_tokens]
    # A conversation is [tokens so far, ids of its complete blocks].
    open_chats: list[tuple[int, list[int]]] = []
    timestamp = 0
    for _ in range(requests):
        timestamp += round(rng.expovariate(1 / 250))
        if open_chats and rng.random() > 1 / turns:
            tokens, blocks = open_chats.pop(rng.randrange(len(open_chats)))
        else:
            prompt = rng.choices(range(system_prompts), popularity)[0]
            tokens, blocks = prompt_tokens[prompt], list(prompt_blocks[prompt])
        input_length = tokens + 1 + round(rng.expovariate(1 / mean_turn_tokens))
        output_length = 1 + round(rng.expovariate(1 / 350))
        blocks += fresh(input_length // BLOCK_TOKENS - len(blocks))
        tail = fresh(1) if input_length % BLOCK_TOKENS else []
        yield TraceRequest(timestamp, input_length, output_length, tuple(blocks + tail))
        if rng.random() > 1 / turns:
            tokens = input_length + output_length
            # The answer completes blocks the next turn will bring; their ids are fixed from now on.
            open_chats.append((tokens, blocks + fresh(tokens // BLOCK_TOKENS - len(blocks))))
