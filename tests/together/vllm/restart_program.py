"""Answer prompts with an engine that has a storage, once; prints a line of JSON. Run with a model and a directory."""

import json
import os
import sys

import tests.together.vllm.conftest  # noqa: F401, sets the environment
from tests.together.vllm.engine import Engine, prompt

from hicache_controller.integrations.vllm import VllmSettings


def main() -> None:
    model, directory = sys.argv[1:]
    engine = Engine(model, VllmSettings(l2_gb=0.02, storage=f"file://{directory}"))
    answers = engine.generate(prompt(400, 1), prompt(300, 2))
    engine.settle()
    counters = {name: value for name, value in engine.metrics().items() if "hicache" in name}
    result = {"answers": [[a.tokens, [sorted(step.items()) for step in a.logprobs], a.cached] for a in answers]}
    print(json.dumps(result | {"counters": counters}), flush=True)  # noqa: T201
    engine.close()
    os._exit(0)


if __name__ == "__main__":
    main()
