"""What vLLM reads from the environment when it is imported: a small engine in this process, and no network."""

import importlib.util
import os

if importlib.util.find_spec("vllm") is not None:
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="WARNING",
        HF_HUB_OFFLINE="1",
        TORCHDYNAMO_DISABLE="1",
    )
