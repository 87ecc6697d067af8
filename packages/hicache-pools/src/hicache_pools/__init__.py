"""Host memory for hierarchical KV caches: extent allocation, host pools for every attention kind, and pool groups."""
