"""Long greedy answers through the engine: does the text stay text?

A prompt is continued greedily with each cache, whatever ends it otherwise. Measured of what was
written: how often it repeats itself, how many of its n-grams differ, and what the reference, exact
rows of the same weights, makes of it as a reader. A small model repeats itself with any cache: what
counts is the distance from the row `bf16`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from subten.bench.kv_lab import EXACT, hidden_states, logits
from subten.codecs import CODECS
from subten.core import PAGE_SIZE, ConfigError, RequestError, SamplingParams, refuse
from subten.engine.llm import LLM
from subten.weights.load import LoadedModel

QUARTERS = 4

_ADAPTIVE = re.compile(r"adaptive-(?P<bits>\d+(\.\d+)?)(?P<cold>-cold)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationQuality:
    """One answer. `repeated_4` is the share of 4-grams that came before, `distinct_N` of n-grams
    that differ; `ppl` the reference's perplexity of the answer, `ppl_quarters` of its quarters;
    `same_as_reference` the tokens before the first that the reference would not have written.
    """

    scheme: str
    ours: bool
    window: int
    true_bits: float
    num_tokens: int
    repeated_4: float
    distinct_1: float
    distinct_2: float
    distinct_3: float
    ppl: float
    ppl_quarters: list[float]
    same_as_reference: int
    answer: str

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return asdict(self)


def evaluate_generation(
    loaded: LoadedModel,
    names: Sequence[str],
    *,
    prompt_ids: Sequence[int],
    num_tokens: int,
    progress: Callable[[float], None] = lambda _share: None,
) -> Iterator[GenerationQuality]:
    """Each cache as it is done: codecs by name, `adaptive-BITS` and `adaptive-BITS-cold`.

    Raises ConfigError for another name, RequestError for more tokens than the context holds.
    """
    limit = loaded.config.max_model_len
    if len(prompt_ids) + num_tokens > limit:
        allowed = f"together with {len(prompt_ids)} of the prompt at most {limit}"
        raise refuse(RequestError, "num", num_tokens, allowed)
    settings = [engine_settings(name.strip()) for name in names]
    for index, (name, options) in enumerate(zip(names, settings, strict=True)):
        answer, bits, text = _write(loaded, options, prompt_ids, num_tokens)
        nll, same = _read(loaded, prompt_ids, answer)
        size = math.ceil(len(nll) / QUARTERS)
        progress((index + 1) / len(names))
        yield GenerationQuality(
            scheme=name.strip(),
            ours=True,
            window=len(prompt_ids),
            true_bits=bits,
            num_tokens=len(answer),
            repeated_4=1 - distinct(answer, 4),
            distinct_1=distinct(answer, 1),
            distinct_2=distinct(answer, 2),
            distinct_3=distinct(answer, 3),
            ppl=math.exp(float(nll.mean())),
            ppl_quarters=[math.exp(float(part.mean())) for part in nll.split(size)],
            same_as_reference=same,
            answer=text,
        )


def distinct(ids: Sequence[int], n: int) -> float:
    """Distinct n-grams over n-grams; 1 where there is none."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def engine_settings(name: str) -> dict[str, Any]:
    """What an engine is given for a cache by its name here; ConfigError lists them."""
    if name in CODECS:
        return {"kv_cache_dtype": name}
    match = _ADAPTIVE.fullmatch(name)
    if match is None:
        raise refuse(ConfigError, "scheme", name, f"adaptive-BITS[-cold], {', '.join(CODECS)}")
    return {
        "kv_cache_dtype": "adaptive",
        "kv_bits_budget": float(match["bits"]),
        "kv_cold_pages": match["cold"] is not None,
    }


def _write(
    loaded: LoadedModel, options: dict[str, Any], prompt_ids: Sequence[int], num_tokens: int
) -> tuple[list[int], float, str]:
    length = len(prompt_ids) + num_tokens
    device = str(loaded.model.device)
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    dtype = str(loaded.dtype).removeprefix("torch.")
    with LLM(
        loaded.name,
        device=device,
        dtype=dtype,
        max_model_len=length,
        max_num_seqs=1,
        # No more than this answer needs: other runs may share the device.
        num_pages=-(-length // PAGE_SIZE),
        **options,
    ) as llm:
        (done,) = llm.generate([list(prompt_ids)], params)
        bits = options.get("kv_bits_budget", llm.pool.full_page_bits)
    assert len(done.token_ids) == num_tokens, done.finish_detail
    return list(done.token_ids), float(bits), done.text


@torch.inference_mode()
def _read(
    loaded: LoadedModel, prompt_ids: Sequence[int], answer: Sequence[int]
) -> tuple[torch.Tensor, int]:
    """The reference's surprise at each token, float64, and the tokens that it agrees on."""
    model = loaded.model
    id_T = torch.tensor([*prompt_ids, *answer], device=model.device)
    x_TD = hidden_states(model, id_T, EXACT)
    nlls, is_same = [], []
    target_T = id_T[len(prompt_ids) :]
    rows = x_TD[len(prompt_ids) - 1 : -1]
    for part_TD, part_T in zip(rows.split(512), target_T.split(512), strict=True):
        log_prob_TV = logits(model, part_TD).log_softmax(dim=-1)
        nlls.append(-log_prob_TV.gather(1, part_T[:, None])[:, 0])
        is_same.append(log_prob_TV.argmax(dim=-1) == part_T)
    same = int(torch.cat(is_same).long().cumprod(0).sum())
    return torch.cat(nlls).double().cpu(), same
