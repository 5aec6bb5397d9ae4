"""How far a model's logits on a device are from those of the torch path in float32 on the CPU.

    python benchmarks/logit_differences.py --device cuda
    python benchmarks/logit_differences.py --device cpu --tokens 32

The reference continues a prompt greedily. Each case then reads prompt and text twice: at once, as a
prompt's chunk, and one token at a time, as decode steps. Exit status 1 where a case is further off
than stated here:

- float32: every logit within FLOAT32_TOLERANCE, and the likeliest token that of the text but where
  the reference's first two are closer than twice that;
- bfloat16: mean and median KL divergence at most BF16_FACTOR times those of torch's own bfloat16 on
  the CPU, which rounds at the same places but for sums and their order; of its two ways of reading
  the larger one.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from subten.bench.records import add_records, origin
from subten.cache.pool import PagePool
from subten.config import cache_dir
from subten.core import PAGE_SIZE
from subten.device import detect
from subten.kernels.step import make_step
from subten.models.decoder import Decoder
from subten.weights.load import LoadedModel, load_model
from subten.weights.upcycled import demo_model

PROMPT = "Once upon a time there was a small house by the sea, and"

FLOAT32_TOLERANCE = 2e-4
"""A sum of 576 to 1,536 float32 terms in another order moves by some 3e-7 of its size: each
addition by 2^-25 / sqrt(3) of a sum that grows as a root. Some 210 products follow one another in
30 layers, and errors add as squares: 4e-6 of logits of deviation 4, so 2e-5. The worst of 200 *
49,152 of them lies five and a half times as far, and keys and values that moved as well add as much
again."""

BF16_FACTOR = 1.5
"""Two roundings of the same kind differ by chance. The median of 200 positions moves by a tenth of
its spread, which is some three times itself. A mean is that of the few positions at which two
experts all but tie, and another is chosen: torch's two ways of reading the same differ by 2.5."""


def load(source: str, device: str, backend: str, dtype: str) -> LoadedModel:
    """The model with pages of its own dtype."""
    return load_model(
        source,
        device=detect(device).torch_device,
        dtype=dtype,
        backend=backend,
        kv_cache_dtype="fp32" if dtype == "float32" else "bf16",
    )


class Reader:
    """A model and pages for one text."""

    def __init__(self, model: Decoder, num_tokens: int) -> None:
        self._model = model
        self._page_ids = [list(range(-(-num_tokens // PAGE_SIZE)))]
        config = model.config
        self._pages_LPGB = PagePool(
            config.num_layers, len(self._page_ids[0]), config.num_kv_heads, model.fmt, model.device
        ).pages_LPGB

    def read(self, token_ids: list[int], start: int) -> torch.Tensor:
        """Logits [T, V] float32 on the CPU after each of the tokens, the first at `start`."""
        step = make_step(
            token_ids=[token_ids],
            starts=[start],
            page_ids=self._page_ids,
            device=self._model.device,
        )
        return self._model(step, self._pages_LPGB, all_rows=True).float().cpu()

    def read_in_steps(self, token_ids: list[int], prompt_len: int) -> torch.Tensor:
        """The same, tokens after the prompt one at a time."""
        rows = [self.read(token_ids[:prompt_len], 0)]
        rows += [self.read(token_ids[i : i + 1], i) for i in range(prompt_len, len(token_ids))]
        return torch.cat(rows)


def greedy(reader: Reader, prompt: list[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Prompt and text, but for its last token, and the logits after each of them."""
    token_ids, rows = list(prompt), [reader.read(prompt, 0)]
    for _ in range(num_tokens - 1):
        token_ids.append(int(rows[-1][-1].argmax()))
        rows.append(reader.read(token_ids[-1:], len(token_ids) - 1))
    return token_ids, torch.cat(rows)


def compare(expected_TV: torch.Tensor, actual_TV: torch.Tensor) -> dict[str, Any]:
    """The figures of a case."""
    expected, actual = expected_TV.double().log_softmax(-1), actual_TV.double().log_softmax(-1)
    kld = (expected.exp() * (expected - actual)).sum(-1)
    best = expected_TV.topk(2)
    parts = actual_TV.argmax(-1) != best.indices[:, 0]
    leads = (best.values[:, 0] - best.values[:, 1])[parts]
    return {
        "num_positions": len(kld),
        "logit_difference_max": float((expected_TV - actual_TV).abs().max()),
        "kld_mean": float(kld.mean()),
        "kld_p50": float(kld.median()),
        "kld_max": float(kld.max()),
        "num_other_tokens": int(parts.sum()),
        "largest_lead_lost": float(leads.max()) if len(leads) else 0.0,
    }


def is_close(case: dict[str, Any], yardsticks: list[dict[str, Any]]) -> bool:
    """Whether a case is as near as stated above; `yardsticks` are those of torch's bfloat16."""
    if case["dtype"] == "float32":
        return (
            case["logit_difference_max"] <= FLOAT32_TOLERANCE
            and case["largest_lead_lost"] <= 2 * FLOAT32_TOLERANCE
        )
    return all(
        case[field] <= BF16_FACTOR * max(yardstick[field] for yardstick in yardsticks)
        for field in ("kld_mean", "kld_p50")
    )


@torch.inference_mode()
def measure(source: str, device: str, num_tokens: int) -> list[dict[str, Any]]:
    """The cases, torch's bfloat16 on the CPU first."""
    reference = load(source, "cpu", "torch", "float32")
    assert reference.tokenizer is not None
    prompt = reference.tokenizer.encode(PROMPT)
    reader = Reader(reference.model, len(prompt) + num_tokens)
    token_ids, expected_TV = greedy(reader, prompt, num_tokens)
    del reference, reader
    wanted = [("cpu", "torch", "bfloat16")]
    if device != "cpu":
        wanted += [(device, backend, "bfloat16") for backend in ("auto", "triton", "torch")]
    wanted += [(device, "auto", "float32")]
    cases: list[dict[str, Any]] = []
    for place, backend, dtype in wanted:
        reader = Reader(load(source, place, backend, dtype).model, len(token_ids))
        for path, actual_TV in (
            ("prompt", reader.read(token_ids, 0)),
            ("steps", reader.read_in_steps(token_ids, len(prompt))),
        ):
            case = {"device": place, "backend": backend, "dtype": dtype, "path": path}
            cases.append(case | compare(expected_TV, actual_TV))
            sys.stderr.write(f"{cases[-1]}\n")
        del reader
    return [case | {"is_close": is_close(case, cases[:2])} for case in cases]


def main() -> int:
    """Measure, print, and keep the record where one asks for it."""
    parser = argparse.ArgumentParser(description="A model's logits against float32 on the CPU.")
    parser.add_argument("--model", default="demo", help="demo, a folder or a .gguf file")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--tokens", type=int, default=200, help="of the text after the prompt")
    parser.add_argument("--record", type=Path, default=None, help="JSON list of records to update")
    options = parser.parse_args()
    source = options.model
    if source == "demo":
        source = str(demo_model(cache_dir(), lambda _what, _share: None))
    device = detect(options.device)
    record = {
        "kind": "logit_differences",
        "shape": options.model,
        "num_tokens": options.tokens,
        "cases": measure(source, device.torch_device.type, options.tokens),
        **origin(device),
    }
    record["command"] = " ".join(["python", "benchmarks/logit_differences.py", *sys.argv[1:]])
    print(json.dumps(record, indent=1))
    if options.record is not None:
        add_records(options.record, [record])
    return 0 if all(case["is_close"] for case in record["cases"]) else 1


if __name__ == "__main__":
    sys.exit(main())
