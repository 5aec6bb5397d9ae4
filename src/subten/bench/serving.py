"""Requests to an OpenAI-compatible server under load, and their latencies as `vllm bench serve`
reports them.

TTFT: request sent to the first piece of output. ITL: gap between two pieces of output of one
request; the wait for the first is not one of them. TPOT: (last - first) / (tokens - 1), tokens as
the server counts them in `usage`. E2EL: request sent to the last piece of output.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from subten.core import ConfigError, refuse

if TYPE_CHECKING:
    from httpx2 import AsyncClient

BACKENDS = {"openai": "completions", "openai-chat": "chat/completions"}
"""Names of `vllm bench serve`, and what each asks."""
DATASETS = ("random", "sharegpt")
METRICS = ("ttft", "tpot", "itl", "e2el")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
SHAREGPT_PROMPT = (4.5, 1.2)
SHAREGPT_OUTPUT = (5.0, 0.9)
"""Mean and deviation of the logarithm of the tokens of a message: medians 90 and 148, with long
tails, as people's chats have them. A stand-in that needs no download, not the data set."""
MAX_SHAREGPT_TOKENS = 1024
WORDS = ("the", "of", "and", "to", "in", "is", "it", "on", "as", "with", "by", "at", "from", "that")


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is asked of a server, and when.

    Requests arrive as a Poisson process of `request_rate` a second (inf: all at once), of which
    `max_concurrency` may be under way at a time (None: any number). Lengths in tokens.
    """

    base_url: str
    model: str
    api_key: str = ""
    backend: str = "openai"
    dataset: str = "random"
    num_prompts: int = 100
    request_rate: float = math.inf
    max_concurrency: int | None = None
    random_input_len: int = 512
    random_output_len: int = 128
    ignore_eos: bool = True
    seed: int = 0
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise refuse(ConfigError, "base_url", self.base_url, "http://... or https://...")
        if self.backend not in BACKENDS:
            raise refuse(ConfigError, "backend", self.backend, ", ".join(BACKENDS))
        if self.dataset not in DATASETS:
            raise refuse(ConfigError, "dataset", self.dataset, ", ".join(DATASETS))
        for name in ("num_prompts", "random_input_len", "random_output_len"):
            if getattr(self, name) < 1:
                raise refuse(ConfigError, name, getattr(self, name), "an integer of at least 1")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise refuse(
                ConfigError, "max_concurrency", self.max_concurrency, "an integer of at least 1"
            )
        if not self.request_rate > 0:
            raise refuse(ConfigError, "request_rate", self.request_rate, "above 0, or inf")


@dataclass(kw_only=True, slots=True)
class Outcome:
    """One request: when its pieces came (seconds of one clock), and what the server counted."""

    num_asked: int
    sent_s: float = 0.0
    piece_times_s: list[float] = field(default_factory=list)
    num_prompt: int | None = None
    num_output: int | None = None
    error: str = ""

    @property
    def is_completed(self) -> bool:
        """Whether it ended as it should."""
        return not self.error

    def latency_ms(self, metric: str) -> float | None:
        """TTFT, TPOT or E2EL; None where the request cannot define it."""
        times = self.piece_times_s
        if not times:
            return None
        if metric == "ttft":
            return (times[0] - self.sent_s) * 1e3
        if metric == "e2el":
            return (times[-1] - self.sent_s) * 1e3
        if self.num_output is None or self.num_output < 2:
            return None
        return (times[-1] - times[0]) * 1e3 / (self.num_output - 1)

    @property
    def itl_ms(self) -> list[float]:
        """Gaps between pieces, one fewer than pieces."""
        times = self.piece_times_s
        return [(b - a) * 1e3 for a, b in pairwise(times)]


def check_server(load: Load) -> None:
    """ConfigError where the server does not answer, wants another key, or has no such model."""
    import httpx2

    url = f"{_root(load)}models"
    try:
        response = httpx2.get(url, headers=_headers(load), timeout=30.0, trust_env=False)
        status, body = response.status_code, response.text
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        allowed = f"a server of OpenAI's API that answers ({error})"
        raise refuse(ConfigError, "base_url", load.base_url, allowed) from error
    if status in (401, 403):
        raise ConfigError(f"api_key: got one that the server refuses; allowed: {load.base_url}'s")
    try:
        names = [str(entry["id"]) for entry in json.loads(body)["data"]] if status == 200 else None
    except (ValueError, KeyError, TypeError):
        names = None
    if names is None:
        allowed = f"a server of OpenAI's API (GET {url} answers {_refusal(status, body)})"
        raise refuse(ConfigError, "base_url", load.base_url, allowed)
    if load.model not in names:
        raise refuse(ConfigError, "model", load.model, ", ".join(names) or "none: it serves none")


def measure_serving(
    load: Load, *, progress: Callable[[float], None] = lambda _share: None
) -> tuple[list[Outcome], float]:
    """Send all requests; what became of each, and the seconds from the first to the last."""
    return asyncio.run(_measure(load, progress))


async def _measure(load: Load, progress: Callable[[float], None]) -> tuple[list[Outcome], float]:
    import httpx2

    rng = random.Random(load.seed)
    requests = [_request(load, rng) for _ in range(load.num_prompts)]
    gaps_s = [0.0] + [_gap_s(load, rng) for _ in requests[1:]]
    room = asyncio.Semaphore(load.max_concurrency or load.num_prompts)
    num_done = 0

    async def run(client: AsyncClient, body: dict[str, Any], outcome: Outcome) -> None:
        nonlocal num_done
        async with room:
            await _send(client, BACKENDS[load.backend], body, outcome)
        num_done += 1
        progress(num_done / load.num_prompts)

    progress(0.0)
    length = "max_tokens" if load.backend == "openai" else "max_completion_tokens"
    outcomes = [Outcome(num_asked=body[length]) for body in requests]
    async with httpx2.AsyncClient(
        base_url=_root(load),
        headers=_headers(load),
        timeout=load.timeout_s,
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,
    ) as client:
        began_s = time.perf_counter()
        due_s = began_s
        async with asyncio.TaskGroup() as tasks:
            for gap_s, body, outcome in zip(gaps_s, requests, outcomes, strict=True):
                # From a fixed start: what one sleep oversleeps does not delay the later ones.
                due_s += gap_s
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                tasks.create_task(run(client, body, outcome))
        duration_s = time.perf_counter() - began_s
    return outcomes, duration_s


def _root(load: Load) -> str:
    return load.base_url.rstrip("/").removesuffix("/v1") + "/v1/"


def _headers(load: Load) -> dict[str, str]:
    return {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}


def _gap_s(load: Load, rng: random.Random) -> float:
    return 0.0 if math.isinf(load.request_rate) else rng.expovariate(load.request_rate)


def _request(load: Load, rng: random.Random) -> dict[str, Any]:
    """A body; its prompt is of fresh words, so that no prefix is shared."""
    num_input, num_output = load.random_input_len, load.random_output_len
    if load.dataset == "sharegpt":
        num_input, num_output = (
            min(max(round(rng.lognormvariate(*shape)), 4), MAX_SHAREGPT_TOKENS)
            for shape in (SHAREGPT_PROMPT, SHAREGPT_OUTPUT)
        )
    # Such words are a token each in the usual vocabularies; usage says what they were.
    text = " ".join(rng.choices(WORDS, k=num_input))
    asked: dict[str, Any] = {"prompt": text, "max_tokens": num_output}
    if load.backend == "openai-chat":
        messages = [{"role": "user", "content": text}]
        asked = {"messages": messages, "max_completion_tokens": num_output}
    body: dict[str, Any] = {
        "model": load.model,
        **asked,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return body | ({"ignore_eos": True} if load.ignore_eos else {})


async def _send(client: AsyncClient, path: str, body: dict[str, Any], outcome: Outcome) -> None:
    import httpx2

    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    outcome.sent_s = time.perf_counter()
    try:
        async with client.stream("POST", path, content=data, headers=headers) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                outcome.error = _refusal(response.status_code, text)
                return
            outcome.error = "the stream ended without [DONE]"
            async for line in response.aiter_lines():
                _take(line, time.perf_counter(), outcome)
    except (httpx2.HTTPError, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
        return
    if outcome.is_completed and outcome.num_output is None:
        outcome.error = "the server sent no usage; tokens cannot be counted"
    elif outcome.is_completed and not outcome.piece_times_s:
        outcome.error = "the answer is empty"


def _refusal(status: int, text: str) -> str:
    """What a server answered in place of a stream: its message, where it is OpenAI's error."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text)["error"]["message"])
    return f"{status}: {' '.join(text[:200].split())}"


def _take(line: str, now_s: float, outcome: Outcome) -> None:
    """One line of a stream of events; ValueError for one that is not of this API."""
    if not line.startswith("data:"):
        return
    text = line[5:].strip()
    if text == "[DONE]":
        outcome.error = ""
        return
    event = json.loads(text)
    try:
        usage, choices = event.get("usage"), event.get("choices")
        if usage:
            outcome.num_prompt = int(usage["prompt_tokens"])
            outcome.num_output = int(usage["completion_tokens"])
        # The last token may have no text; its event then says why the answer ended.
        if choices and (_text(choices[0]) or choices[0].get("finish_reason")):
            outcome.piece_times_s.append(now_s)
        is_error = bool(event.get("error"))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"the server sent {text[:200]}") from error
    if is_error:
        raise ValueError(f"the server sent {text[:200]}")


def _text(choice: dict[str, Any]) -> str:
    """What an event shows, thoughts of a model that tells them apart included."""
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""


def parse_goodput(limits: Sequence[str]) -> dict[str, float]:
    """`ttft:100` and the like as limits in ms; ConfigError for anything else."""
    found = {}
    for text in limits:
        name, _, value = text.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in GOODPUT_METRICS or name in found or not 0 < limit < math.inf:
            allowed = f"METRIC:MS with {', '.join(GOODPUT_METRICS)}, each once"
            raise refuse(ConfigError, "goodput", text, allowed)
        found[name] = limit
    return found


def summarise(
    load: Load,
    outcomes: Sequence[Outcome],
    duration_s: float,
    *,
    goodput: Mapping[str, float],
    percentiles: Sequence[float] = (50, 90, 99),
    metrics: Sequence[str] = METRICS,
) -> dict[str, Any]:
    """The result under the names of `vllm bench serve`; None for what no request defines."""
    completed = [outcome for outcome in outcomes if outcome.is_completed]
    num_output = sum(outcome.num_output or 0 for outcome in completed)
    num_input = sum(outcome.num_prompt or 0 for outcome in completed)
    good = [outcome for outcome in completed if _is_good(outcome, goodput)]
    result: dict[str, Any] = {
        "backend": load.backend,
        "endpoint_type": load.backend,
        "label": None,
        "model_id": load.model,
        "tokenizer_id": None,
        "dataset_name": load.dataset,
        "num_prompts": load.num_prompts,
        "request_rate": "inf" if math.isinf(load.request_rate) else load.request_rate,
        "burstiness": 1.0,
        "max_concurrency": load.max_concurrency,
        "seed": load.seed,
        "duration": duration_s,
        "completed": len(completed),
        "failed": len(outcomes) - len(completed),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(completed) / duration_s,
        "request_goodput": len(good) / duration_s if goodput else None,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_output_tokens_per_s": _busiest_second(completed),
        "max_concurrent_requests": _most_at_a_time(completed),
        "requests_of_other_output_len": sum(o.num_output != o.num_asked for o in completed),
        "requests_of_merged_pieces": sum(len(o.piece_times_s) != o.num_output for o in completed),
        "errors": sorted({outcome.error for outcome in outcomes if outcome.error})[:10],
    }
    for metric in metrics:
        result |= _statistics(metric, _samples(metric, completed), percentiles)
    return result


def details(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Each request under the names of `--save-detailed`: seconds, tokens, and what failed."""
    return {
        "input_lens": [outcome.num_prompt for outcome in outcomes],
        "output_lens": [outcome.num_output for outcome in outcomes],
        "start_times": [outcome.sent_s for outcome in outcomes],
        "ttfts": [t[0] - o.sent_s if (t := o.piece_times_s) else None for o in outcomes],
        "itls": [[gap / 1e3 for gap in outcome.itl_ms] for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }


def _busiest_second(completed: Sequence[Outcome]) -> float | None:
    """Most tokens in one of the seconds since the first request; None without any.

    A piece counts as an even share of its answer's tokens.
    """
    if not completed:
        return None
    began_s = min(outcome.sent_s for outcome in completed)
    tokens: dict[int, float] = defaultdict(float)
    for outcome in completed:
        assert outcome.num_output is not None
        share = outcome.num_output / len(outcome.piece_times_s)
        for time_s in outcome.piece_times_s:
            tokens[int(time_s - began_s)] += share
    return max(tokens.values())


def _most_at_a_time(completed: Sequence[Outcome]) -> int:
    """Most requests that were under way at one moment, from sending to the last piece."""
    begins = [(outcome.sent_s, 1) for outcome in completed]
    ends = [(outcome.piece_times_s[-1], -1) for outcome in completed]
    return max(accumulate((step for _, step in sorted(begins + ends)), initial=0))


def _samples(metric: str, completed: Sequence[Outcome]) -> list[float]:
    if metric == "itl":
        return [gap for outcome in completed for gap in outcome.itl_ms]
    found = [outcome.latency_ms(metric) for outcome in completed]
    return [value for value in found if value is not None]


def _is_good(outcome: Outcome, goodput: Mapping[str, float]) -> bool:
    """Whether a request kept all limits; what it cannot define it cannot break."""
    values = [(outcome.latency_ms(name), limit) for name, limit in goodput.items()]
    return all(value is None or value <= limit for value, limit in values)


def _statistics(
    metric: str, samples: Sequence[float], percentiles: Sequence[float]
) -> dict[str, Any]:
    ordered = sorted(samples)
    found: dict[str, Any] = {
        f"mean_{metric}_ms": statistics.fmean(ordered) if ordered else None,
        f"median_{metric}_ms": percentile(ordered, 50) if ordered else None,
        f"std_{metric}_ms": statistics.pstdev(ordered) if ordered else None,
    }
    for share in percentiles:
        found[f"p{share:g}_{metric}_ms"] = percentile(ordered, share) if ordered else None
    return found


def percentile(ordered: Sequence[float], share: float) -> float:
    """A percentile of sorted samples, 0 to 100, linear between them as NumPy's is."""
    place = (len(ordered) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
