"""Perplexity by the engine itself: pages encoded, moved and lowered as it serves a text.

Schemes elsewhere are read in one pass (kv_lab.py), with the oldest pages lowered first. Here a
window is a prompt whose tokens' log-probabilities are asked for, computed one page a step, so that
between two pages the cache does what it does in decoding: what a page loses it has lost for all
later ones, and who goes first is decided by the attention that pages drew. The two agree where no
page is lowered, and the engine should lose less where some are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from subten.bench.kv_generation import engine_settings
from subten.bench.kv_lab import EXACT, LOGIT_ROWS, hidden_states, logits
from subten.core import PAGE_SIZE, ConfigError, RequestError, SamplingParams, refuse
from subten.engine.llm import LLM
from subten.weights.load import LoadedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineQuality:
    """One cache's figures; reference: exact rows of the same weights, read in one pass.

    `true_bits` of an adaptive cache are its budget.
    """

    scheme: str
    ours: bool
    window: int
    true_bits: float
    ppl: float
    ppl_reference: float
    ppl_ratio: float
    top1_agreement: float
    num_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return asdict(self)


def evaluate_engine(
    loaded: LoadedModel,
    names: Sequence[str],
    token_ids: Sequence[int],
    *,
    window: int,
    progress: Callable[[float], None] = lambda _share: None,
) -> Iterator[EngineQuality]:
    """Each cache as it is done: codecs by name, `adaptive-BITS` and `adaptive-BITS-cold`.

    The text is cut into windows that do not overlap; a shorter last one is left out. The first and
    the last token of a window are not scored. Raises ConfigError for another name or a window that
    the model cannot take, RequestError for too little text.
    """
    limit = loaded.config.max_model_len
    if not 3 <= window <= limit:
        raise refuse(ConfigError, "window", window, f"3 to the model's context of {limit}")
    starts = range(0, len(token_ids) - window + 1, window)
    if not starts:
        raise refuse(RequestError, "text", f"{len(token_ids)} tokens", f"at least {window}")
    settings = [engine_settings(name.strip()) for name in names]
    prompts = [list(token_ids[start : start + window - 1]) for start in starts]
    expected = [_expected(loaded, prompt) for prompt in prompts]
    reference = math.fsum(nll for nlls, _ in expected for nll in nlls)
    likeliest = [token for _, tokens in expected for token in tokens]
    count = len(likeliest)
    for index, (name, options) in enumerate(zip(names, settings, strict=True)):
        nll, same, bits = _read(loaded, options, prompts, likeliest)
        progress((index + 1) / len(names))
        yield EngineQuality(
            scheme=name.strip(),
            ours=True,
            window=window,
            true_bits=bits,
            ppl=math.exp(nll / count),
            ppl_reference=math.exp(reference / count),
            ppl_ratio=math.exp((nll - reference) / count),
            top1_agreement=same / count,
            num_tokens=count,
        )


def _read(
    loaded: LoadedModel,
    options: dict[str, Any],
    prompts: Sequence[list[int]],
    likeliest: Sequence[int],
) -> tuple[float, int, float]:
    """Nats of all scored tokens, how many have the likeliest token expected, true bits."""
    length = len(prompts[0]) + 1
    with LLM(
        loaded.name,
        device=str(loaded.model.device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        max_model_len=length,
        max_num_seqs=1,
        max_num_batched_tokens=PAGE_SIZE,
        enable_prefix_caching=False,
        num_pages=-(-length // PAGE_SIZE),
        **options,
    ) as llm:
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
        answers = llm.generate(prompts, params)
        bits = float(options.get("kv_bits_budget", llm.pool.full_page_bits))
    places = [place for answer in answers for place in answer.prompt_logprobs or ()]
    assert len(places) == len(likeliest), (len(places), len(likeliest))
    same = sum(p.top[0][0] == token for p, token in zip(places, likeliest, strict=True))
    return -math.fsum(place.logprob for place in places), same, bits


@torch.inference_mode()
def _expected(loaded: LoadedModel, prompt: Sequence[int]) -> tuple[list[float], list[int]]:
    """The reference's surprise at each token but the first, and what it finds likeliest there."""
    model = loaded.model
    id_T = torch.tensor(prompt, device=model.device)
    x_TD = hidden_states(model, id_T, EXACT)[:-1]
    nlls: list[float] = []
    tokens: list[int] = []
    rows = LOGIT_ROWS[model.device.type]
    for part_TD, part_T in zip(x_TD.split(rows), id_T[1:].split(rows), strict=True):
        log_prob_TV = logits(model, part_TD).log_softmax(dim=-1)
        nlls += (-log_prob_TV.gather(1, part_T[:, None])[:, 0]).tolist()
        tokens += log_prob_TV.argmax(dim=-1).tolist()
    return nlls, tokens
