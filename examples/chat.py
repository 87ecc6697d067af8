"""A chat over a long document with transformers, turn by turn, without prefix cache and with one.

As it stands it builds a tiny model with random weights and talks in random tokens; nothing is downloaded. With
``--model NAME`` (and weights at hand) it talks about a text file. The table shows, for every turn, how much of the
prompt came from which tier: from the device while the chat goes on, from host memory after others have pushed it out of
the device's share, and from files after a restart.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
import typer
from rich.console import Console
from rich.table import Column, Table
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from hicache_controller.integrations.transformers import HiCache, Hit

QUESTIONS = (
    "What is this text about?",
    "Which part of it would you read first, and why?",
    "Name three things a reader has to know before.",
    "What does it leave open?",
    "Put it into one sentence.",
    "Ask me a question about it.",
)
PUSHED_OUT_BEFORE, RESTARTED_BEFORE = 4, 6  # turns
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
console = Console()


class Talk(Protocol):
    """What is said in the chat, as token ids."""

    def ask(self, said: torch.Tensor, turn: int) -> torch.Tensor:
        """Return the next prompt, int64 ``[1, tokens]``: all that was said so far, and a question."""

    def text(self, answer: torch.Tensor) -> str:
        """Return an answer as text."""


class RandomTalk:
    """Random tokens: a document of 1,500 and questions of 40."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        torch.manual_seed(0)

    def ask(self, said: torch.Tensor, turn: int) -> torch.Tensor:
        """Return what was said and random tokens, at first as many as a document has."""
        return torch.cat((said, torch.randint(self.vocabulary, (1, 40 if said.numel() else 1500))), dim=1)

    def text(self, answer: torch.Tensor) -> str:
        """Return the first tokens as numbers."""
        return " ".join(map(str, answer[:8].tolist())) + " ..."


class TextTalk:
    """A text file and questions on it, as plain text, so that what was said before stays as it was."""

    def __init__(self, model: str, document: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self.document = document.read_text()

    def ask(self, said: torch.Tensor, turn: int) -> torch.Tensor:
        """Return what was said and the turn's question, at first after the document."""
        question = f"\n\nUser: {QUESTIONS[turn % len(QUESTIONS)]}\nAssistant:"
        text = question if said.numel() else self.document + question
        ids: torch.Tensor = self.tokenizer(text, return_tensors="pt", add_special_tokens=not said.numel()).input_ids
        return torch.cat((said, ids), dim=1)

    def text(self, answer: torch.Tensor) -> str:
        """Return the text."""
        return str(self.tokenizer.decode(answer, skip_special_tokens=True)).strip()


def tiny_model() -> Any:
    """Return a Llama of six layers with random weights, in double precision: no rounding decides between two tokens."""
    config = LlamaConfig(
        num_hidden_layers=6, hidden_size=256, intermediate_size=768, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=1000, max_position_embeddings=4096, initializer_range=0.06, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_num_threads(1)  # at this size, more threads only get in each other's way
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64)  # type: ignore[no-untyped-call]


def answer(model: Any, prompt: torch.Tensor, new_tokens: int, cache: HiCache | None) -> tuple[torch.Tensor, float, Hit]:
    """Generate the answer to a prompt; returns all tokens, the seconds it took, and what came from which tier."""
    options = {"max_new_tokens": new_tokens, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    begin = time.perf_counter()
    if cache is None:
        return model.generate(prompt, **options), time.perf_counter() - begin, Hit(0)
    # This is all there is to it. Entering matches the prompt and starts the load; generate() computes what is missing;
    # leaving keeps the new pages, and writes them to the host and to storage while the next turn runs.
    with cache.session(prompt) as past:
        tokens = model.generate(prompt, past_key_values=past, **options)
    return tokens, time.perf_counter() - begin, Hit(0) if past is None else past.hits[0]


def main(
    model: Annotated[
        str, typer.Option(help="Model of transformers, by name or directory; by default a tiny one.")
    ] = "",
    document: Annotated[Path, typer.Option(help="Text to talk about with --model.")] = Path(__file__),
    turns: Annotated[int, typer.Option(help="Questions to ask.")] = 6,
    new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 24,
    l2_gb: Annotated[float, typer.Option(help="GB of host memory for the cache.")] = 0.5,
) -> None:
    """Chat without cache and with it, and compare answers and times."""
    network: Any
    talk: Talk
    if model:
        network, talk = AutoModelForCausalLM.from_pretrained(model, dtype="auto"), TextTalk(model, document)
    else:
        network, talk = tiny_model(), RandomTalk(1000)
    network = network.to(DEVICE).eval()
    warnings.simplefilter("ignore", FutureWarning)  # newer transformers would rather call past_key_values cache
    columns = ("turn", "prompt", "L1", "L2", "L3", "computed", "no cache", "hicache", "answers")
    table = Table(*(Column(name, justify="right") for name in columns), title=f"tokens and times, on {DEVICE}")
    different, reused = 0, [0, 0, 0]
    with tempfile.TemporaryDirectory(prefix="hicache-chat-") as directory:

        def start() -> HiCache:
            # The fingerprint is made of the name, the weights, and what else changes keys and values: bytes of another
            # model are never found, those of this one are found again by any process.
            return HiCache.for_model(network, model_id=model or "tiny", l2_gb=l2_gb, storage=directory)

        cache = start()
        said = torch.empty((1, 0), dtype=torch.int64)
        for turn in range(1, turns + 1):
            prompt = talk.ask(said, turn - 1).to(DEVICE)
            if turn == PUSHED_OUT_BEFORE:
                cache.drop_device()  # as if other chats had used the device's share meanwhile
            if turn == RESTARTED_BEFORE:
                cache.close()  # all that survives is the directory
                cache = start()
            expected, without, _ = answer(network, prompt, new_tokens, None)
            answered, seconds, hit = answer(network, prompt, new_tokens, cache)
            same = torch.equal(expected, answered)
            different += not same
            used = (hit.device, hit.host, hit.storage)
            reused = [total + tokens for total, tokens in zip(reused, used, strict=True)]
            table.add_row(
                str(turn), str(prompt.shape[1]), *map(str, used), str(prompt.shape[1] - hit.tokens),
                f"{without:.2f} s", f"{seconds:.2f} s", "same" if same else "differ",
            )  # fmt: skip
            if model:
                console.print(f"[{turn}] {talk.text(answered[0, prompt.shape[1] :])}", markup=False)
            said = answered.cpu()
        cache.close()
    console.print(table)
    # In half precision a prefix that was computed in another batch shape may round to another token now and then.
    if model:
        return
    if different:
        raise SystemExit(f"{different} answers differ between cache and no cache")
    if turns >= RESTARTED_BEFORE and not all(reused):
        raise SystemExit("a tier was of no use")


if __name__ == "__main__":
    typer.run(main)
