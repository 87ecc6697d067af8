"""Page hashes against an independent rendering of the documented byte layout."""

import os
import struct
import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from hicache_controller.hashing import HASH_BYTES, Namespace, page_hashes

fields = st.none() | st.text(max_size=8) | st.binary(max_size=8)
namespaces = st.builds(Namespace, salt=fields, adapter=fields, modality=fields)
token_lists = st.lists(st.integers(-1, 2**31 - 1), max_size=60)


def documented(tokens: list[int], page_size: int, namespace: Namespace) -> list[bytes]:
    head = b"hicache/page-hash/1\n"
    for tag, value in zip("SAM", (namespace.salt, namespace.adapter, namespace.modality), strict=True):
        if value is not None:
            raw = value.encode() if isinstance(value, str) else value
            head += tag.encode() + struct.pack("<Q", len(raw)) + raw
    parent, hashes = xxhash.xxh3_128(head).digest(), []
    for page in range(len(tokens) // page_size):
        h = xxhash.xxh3_128(parent)
        for token in tokens[page * page_size : (page + 1) * page_size]:
            h.update(struct.pack("<q", token))
        parent = h.digest()
        hashes.append(parent)
    return hashes


@given(token_lists, st.integers(1, 9), namespaces)
def test_hashes_follow_the_documented_byte_layout(tokens, page_size, namespace):
    got = page_hashes(np.array(tokens, dtype=np.int64), page_size, namespace=namespace)
    assert got == documented(tokens, page_size, namespace)
    assert all(len(h) == HASH_BYTES for h in got)


@given(token_lists, st.integers(1, 9), st.integers(0, 8), namespaces)
def test_a_sequence_extended_page_by_page_has_the_hashes_of_the_whole(tokens, page_size, cut, namespace):
    whole = np.array(tokens, dtype=np.int64)
    cut = min(cut, len(tokens) // page_size)
    head = page_hashes(whole[: cut * page_size], page_size, namespace=namespace)
    if head:
        tail = page_hashes(whole[cut * page_size :], page_size, parent=head[-1])
    else:
        tail = page_hashes(whole, page_size, namespace=namespace)
    assert head + tail == page_hashes(whole, page_size, namespace=namespace)


@given(token_lists, st.integers(1, 9))
def test_width_and_strides_of_the_array_do_not_change_the_hashes(tokens, page_size):
    wide = np.array(tokens, dtype=np.int64)
    strided = np.repeat(wide, 2)[::2]
    expected = page_hashes(wide, page_size)
    assert page_hashes(wide.astype(np.int32), page_size) == expected
    assert page_hashes(strided, page_size) == expected
    assert page_hashes(wide.astype(">i8"), page_size) == expected


@given(namespaces, namespaces)
def test_different_namespaces_have_different_roots(one, other):
    def normal(n):
        return [v.encode() if isinstance(v, str) else v for v in (n.salt, n.adapter, n.modality)]

    assert (one.root_hash() == other.root_hash()) == (normal(one) == normal(other))


def test_a_value_counts_for_the_field_it_is_in():
    tokens = np.arange(4)
    keys = {page_hashes(tokens, 4, namespace=Namespace(**{f: "X"}))[0] for f in ("salt", "adapter", "modality")}
    keys.add(page_hashes(tokens, 4)[0])
    keys.add(page_hashes(tokens, 4, namespace=Namespace(salt=""))[0])
    assert len(keys) == 5


def test_an_earlier_token_changes_every_later_hash():
    tokens = np.arange(32)
    changed = tokens.copy()
    changed[5] += 1
    same = [a == b for a, b in zip(page_hashes(tokens, 4), page_hashes(changed, 4), strict=True)]
    assert same == [True] + [False] * 7


def test_hashes_are_the_same_in_another_process_and_version():
    golden = ["ddbdf05858b72f6cbe873587db99a8cf", "cc6d3120003f1d889c53d2101c0a5e38"]
    program = (
        "import numpy as np; from hicache_controller.hashing import *;"
        "print([h.hex() for h in page_hashes(np.arange(8), 4, namespace=Namespace('s', 'a', 'm'))])"
    )
    for seed in ("0", "1"):
        out = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert out.stdout.strip() == str(golden)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"tokens": [1, 2], "page_size": 1}, TypeError, "list"),
        ({"tokens": np.zeros(2), "page_size": 1}, TypeError, "float64"),
        ({"tokens": np.zeros(2, np.uint64), "page_size": 1}, TypeError, "uint64"),
        ({"tokens": np.zeros((2, 2), int), "page_size": 1}, ValueError, "shape"),
        ({"tokens": np.zeros(2, int), "page_size": 0}, ValueError, "page_size is 0"),
        ({"tokens": np.zeros(2, int), "page_size": 1, "parent": b"short"}, ValueError, "5 bytes"),
        ({"tokens": np.zeros(2, int), "page_size": 1, "parent": b"", "namespace": None}, ValueError, "0 bytes"),
        (
            {"tokens": np.zeros(2, int), "page_size": 1, "parent": bytes(16), "namespace": Namespace()},
            ValueError,
            "both",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments, error, words):
    with pytest.raises(error, match=words):
        page_hashes(**arguments)
