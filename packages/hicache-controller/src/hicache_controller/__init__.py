"""Orders KV cache transfers against compute, keeps the prefix tree and the storage tier; the hicache command line."""
