"""Smoke check of a fresh installation of hicache-controller: a short replay, every byte checked."""

from hicache_controller.tools.replay import Replay, ReplayOptions
from hicache_controller.tools.trace import make_trace

requests = make_trace(20)
with Replay(requests, ReplayOptions(page_size=4, block_tokens=4, l1_pages=100, l2_pages=200)) as replay:
    report = replay.run()
if not report.hits:
    raise SystemExit("a trace of chats found nothing in the cache")
