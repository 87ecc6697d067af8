"""What is known to be in storage, pool by pool."""

from __future__ import annotations

import threading

from hicache_controller.tree.presence import Run, StoragePresence


def test_removals_noted_by_many_threads_arrive_once_each() -> None:
    presence = StoragePresence(remember=True)
    keys = [number.to_bytes(16) for number in range(4000)]
    presence.stored("kv", keys, None)
    threads = [
        threading.Thread(target=lambda part=keys[i::4]: [presence.note_removed([k], "kv") for k in part])
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    taken: list[bytes] = []
    while any(thread.is_alive() for thread in threads):
        taken += presence.take_noted().get("kv", [])
    taken += presence.take_noted().get("kv", [])
    assert sorted(taken) == keys
    assert presence.removed("kv", taken) == [Run(tuple(keys), None)]


def test_runs_are_cut_where_pages_are_known_or_gone() -> None:
    presence = StoragePresence(remember=True)
    a, b, c, d, e = (bytes([number]) * 16 for number in range(5))
    assert presence.stored("kv", [a, b, c, d, e], None) == [Run((a, b, c, d, e), None)]
    assert presence.removed("kv", [e, b, a]) == [Run((e,), d), Run((a, b), None)]
    presence.storing("kv", [a, b, e])
    assert presence.stored("kv", [a, b, c, d, e], None) == [Run((a, b), None), Run((e,), d)]
    assert presence.removed("kv", [d, d]) == [Run((d,), c)]
    assert presence.stored("kv", [c, d, e], b) == [], "what was removed is not there"
    presence.storing("kv", [d])
    assert presence.stored("kv", [c, d, e], b) == [Run((d,), c)]
    assert presence.removed("kv", [b"unknown"]) == []
    assert StoragePresence(remember=False).stored("kv", [a], None) == []


def test_pools_are_known_by_themselves() -> None:
    presence = StoragePresence(remember=True)
    a, b = (bytes([number]) * 16 for number in range(2))
    presence.note_removed([b], "swa")
    presence.note_removed([a], "kv")
    presence.note_removed([a], "swa")
    assert presence.take_noted() == {"swa": [b, a], "kv": [a]}
    assert presence.take_noted() == {}
    for pool in ("kv", "swa"):
        presence.stored(pool, [a, b], None)
    assert presence.removed("swa", [b]) == [Run((b,), a)]
    assert (presence.lacks_any("swa", [a, b]), presence.lacks_any("kv", [a, b]), len(presence)) == (True, False, 1)
    presence.storing("kv", [b])
    assert presence.lacks_any("swa", [b]), "a page that is stored again has no windows by that"
    assert presence.stored("swa", [b], a) == []
    presence.removed("kv", [a])
    presence.forget_removed(keep=[b])
    assert (presence.lacks_any("swa", [b]), presence.lacks_any("kv", [a])) == (True, False)
    presence.storing("swa", [b])
    assert presence.stored("swa", [b], a) == [Run((b,), a)]
    assert presence.forget_all() == [("kv", Run((b,), a)), ("swa", Run((a, b), None))]
