"""How far an answer alone and the same one among others differ: log-probabilities, and texts.

    python benchmarks/batch_differences.py --model demo --kv-cache-dtype int4 --device cpu
    python benchmarks/batch_differences.py --device cuda --batches 2 7 8 16

Greedy answers to a few prompts, alone and in batches with prompts of random tokens, at a random
place. Tokens are compared up to the first that differs; there `near_tie_max` says how much likelier
the token was that the prompt had alone, by its log-probabilities alone.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from subten.bench.records import add_records, origin
from subten.config import cache_dir
from subten.core import SamplingParams, TokenLogprobs
from subten.device import detect
from subten.engine.llm import LLM
from subten.weights.upcycled import demo_model

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a small house by the sea, and",
    "To make bread, first",
)
NUM_TOP = 5


def answers(llm: LLM, prompts: list[Any], num_tokens: int) -> list[list[TokenLogprobs]]:
    """Each token of each greedy answer."""
    params = SamplingParams(
        max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=NUM_TOP
    )
    found = llm.generate(prompts, params)
    return [list(completion.logprobs or ()) for completion in found]


def compare(alone: list[TokenLogprobs], among: list[TokenLogprobs]) -> tuple[float, float | None]:
    """Largest difference of log-probabilities of equal tokens, and the tie where they part."""
    most = 0.0
    for one, other in zip(alone, among, strict=True):
        if one.token_id != other.token_id:
            chances = dict(one.top)
            return most, one.logprob - chances.get(other.token_id, one.top[-1][1])
        most = max(most, abs(one.logprob - other.logprob))
    return most, None


def measure(llm: LLM, options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a record, by batch size."""
    rng = random.Random(options.seed)
    alone = [answers(llm, [prompt], options.tokens)[0] for prompt in PROMPTS]
    by_batch = {}
    for batch_size in options.batches:
        differences, ties = [], []
        for _ in range(options.repeats):
            for prompt, expected in zip(PROMPTS, alone, strict=True):
                others: list[Any] = [
                    [rng.randrange(1000) for _ in range(rng.randrange(4, 40))]
                    for _ in range(batch_size - 1)
                ]
                place = rng.randrange(batch_size)
                found = answers(llm, [*others[:place], prompt, *others[place:]], options.tokens)[
                    place
                ]
                difference, tie = compare(expected, found)
                differences.append(difference)
                ties += [] if tie is None else [tie]
        by_batch[str(batch_size)] = {
            "answers": len(differences),
            "logprob_difference_max": max(differences),
            "answers_that_part": len(ties),
            "near_tie_max": max(ties, default=None),
        }
        sys.stderr.write(f"{batch_size}: {by_batch[str(batch_size)]}\n")
    return {"by_batch_size": by_batch}


def main() -> None:
    """Measure, print, and keep the record where one asks for it."""
    parser = argparse.ArgumentParser(description="Answers alone and among others.")
    parser.add_argument("--model", default="demo", help="demo, a folder or a .gguf file")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kv-cache-dtype", default="int4")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 7, 8, 9, 16])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, default=None, help="JSON list of records to update")
    options = parser.parse_args()
    source = options.model
    if source == "demo":
        source = str(demo_model(cache_dir(), lambda _what, _share: None))
    llm = LLM(
        source,
        device=options.device,
        kv_cache_dtype=options.kv_cache_dtype,
        quantization=options.quantization,
        max_model_len=512,
        max_num_seqs=max(options.batches),
        enable_prefix_caching=False,
        gpu_memory_utilization=0.3,
    )
    record = {
        "kind": "batch_differences",
        "shape": options.model,
        "weights_dtype": options.quantization,
        "kv_cache_dtype": options.kv_cache_dtype,
        "num_tokens": options.tokens,
        **measure(llm, options),
        **origin(detect(options.device)),
    }
    record["command"] = " ".join(["python", "benchmarks/batch_differences.py", *sys.argv[1:]])
    print(json.dumps(record, indent=1))
    if options.record is not None:
        add_records(options.record, [record])


if __name__ == "__main__":
    main()
