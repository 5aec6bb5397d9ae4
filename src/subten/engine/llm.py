"""`LLM`: a model, its engine and its tokenizer behind generate, stream and chat."""

from __future__ import annotations

import functools
import itertools
import logging
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from subten.cache.adaptive_pool import AdaptivePool
from subten.cache.allocator import PageAllocator
from subten.cache.pool import KVPool, PagePool
from subten.cache.use import CacheUse
from subten.calibration.keys_at_load import (
    MIN_TOKENS,
    KeyCalibration,
    calibrate_keys,
    read_text,
    shipped_text,
)
from subten.codecs.adaptive import AdaptiveFormat
from subten.config import EngineConfig, cache_dir
from subten.core import (
    ConfigError,
    Request,
    RequestError,
    SamplingParams,
    TokenEvent,
    UserError,
    refuse,
)
from subten.engine.attend_speed import warn_if_slow
from subten.engine.completion import Chunk, Completion, Usage
from subten.engine.engine import Engine, RequestRecord
from subten.engine.expert_load import ExpertLoad
from subten.engine.graph_inputs import capture_cuda_graph
from subten.engine.graphs import SIZE_STEP, DecodeGraphs
from subten.engine.prefill_graphs import PrefillGraphs
from subten.engine.prompts import (
    Prompt,
    as_prompts,
    as_sampling_params,
    as_token_ids,
    check_params,
)
from subten.engine.resolve import (
    Limits,
    check_loaded,
    max_step_bytes,
    resolve_device,
    resolve_limits,
)
from subten.engine.runner import Runner
from subten.engine.scheduler import Scheduler
from subten.engine.stop import NoText, TextOutput
from subten.tokenizer import Tokenizer
from subten.weights.load import LoadedModel, load_model

logger = logging.getLogger(__name__)

__all__ = ["LLM", "Chunk", "Completion", "Usage"]


@dataclass(kw_only=True, slots=True)
class _Live:
    """A request that someone waits for."""

    record: RequestRecord
    output: TextOutput
    chunks: deque[Chunk] = field(default_factory=deque)
    completion: Completion | None = None


class LLM:
    """A model ready to continue text; instances are independent of one another.

    `model` is a folder, a GGUF file or a name that `load_model` knows, or a model it has loaded.
    The other parameters are the fields of `EngineConfig`, and `progress(done, total)`, called as
    weights are loaded. Calls from several threads at a time are not supported; several open
    streams in one thread are.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel,
        *,
        kv_cache_dtype: str = "bf16",
        device: str = "auto",
        dtype: str = "auto",
        backend: str = "auto",
        quantization: str = "none",
        quantize_head: bool = True,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        max_prefill_tokens: int | None = None,
        max_queue: int | None = None,
        num_pages: int | None = None,
        gpu_memory_utilization: float = 0.9,
        cpu_kv_cache_bytes: int = 256 * 2**20,
        enable_prefix_caching: bool = True,
        enforce_eager: bool = False,
        kv_bits_budget: float | None = None,
        kv_memory_bytes: int | None = None,
        kv_cold_pages: bool = False,
        kv_outlier_channels: float | None = None,
        kv_sink_tokens: int | None = None,
        kv_window_tokens: int | None = None,
        kv_calibration: str | None = None,
        kv_key_bias: str = "auto",
        seed: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.config = EngineConfig(
            kv_cache_dtype=kv_cache_dtype,
            device=device,
            dtype=dtype,
            backend=backend,
            quantization=quantization,
            quantize_head=quantize_head,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_prefill_tokens=max_prefill_tokens,
            max_queue=max_queue,
            num_pages=num_pages,
            gpu_memory_utilization=gpu_memory_utilization,
            cpu_kv_cache_bytes=cpu_kv_cache_bytes,
            enable_prefix_caching=enable_prefix_caching,
            enforce_eager=enforce_eager,
            kv_bits_budget=kv_bits_budget,
            kv_memory_bytes=kv_memory_bytes,
            kv_cold_pages=kv_cold_pages,
            kv_outlier_channels=kv_outlier_channels,
            kv_sink_tokens=kv_sink_tokens,
            kv_window_tokens=kv_window_tokens,
            kv_calibration=kv_calibration,
            kv_key_bias=kv_key_bias,
            seed=seed,
        )
        self._live: dict[str, _Live] = {}
        self._request_numbers = itertools.count()
        self._seeds = random.Random(seed)
        self._start(model, progress)
        self._is_open = True

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Continue one or many prompts, texts or token ids; completions in the prompts' order.

        One SamplingParams serves all prompts, a list has one for each. All prompts are checked
        before the first is started: RequestError names the prompt, what came and what is allowed.
        `max_tokens` beyond the room that is left ends with LENGTH when the room is used up.
        """
        batch = as_prompts(prompts)
        params = as_sampling_params(sampling_params, len(batch))
        names = [f"prompts[{i}]" for i in range(len(batch))]
        ids = [
            self._encode(prompt, p, name=name)
            for prompt, p, name in zip(batch, params, names, strict=True)
        ]
        return self._complete(list(zip(ids, params, strict=True)))

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[Chunk]:
        """Continue one prompt, a chunk for each token; closing the iterator cancels the request.

        A bad prompt raises RequestError here, not at the first chunk.
        """
        params = as_sampling_params(sampling_params, 1)[0]
        return self._chunks(self._encode(prompt, params, name="prompt"), params)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
    ) -> Completion:
        """The assistant's next message in a conversation of {"role", "content"} messages.

        With prefix caching the pages of earlier turns are found again, in whole pages of 64 tokens.
        """
        params = as_sampling_params(sampling_params, 1)[0]
        return self._complete([(self._encode_chat(messages, params), params)])[0]

    def chat_stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
    ) -> Iterator[Chunk]:
        """`chat`, a chunk for each token."""
        params = as_sampling_params(sampling_params, 1)[0]
        return self._chunks(self._encode_chat(messages, params), params)

    @property
    def cache_use(self) -> CacheUse:
        """What the pages take that sequences hold now, by kind."""
        allocator = self.engine.scheduler.allocator
        pages = [page for page in range(allocator.num_pages) if allocator.num_holders(page)]
        return self.pool.use(pages, num_seqs=len(self.engine.scheduler.running))

    def close(self) -> None:
        """End every request and let go of weights and pages; the instance is of no use after it."""
        if not self._is_open:
            return
        for live in list(self._live.values()):
            self._drop(live)
        self._is_open = False
        del self.engine, self.pool, self.loaded

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(
        self, model: str | Path | LoadedModel, progress: Callable[[int, int], None] | None
    ) -> None:
        config = self.config
        calibration_text = read_text(config.kv_calibration)
        if isinstance(model, LoadedModel):
            self.device = resolve_device(replace(config, device=str(model.model.device)))
            self.loaded = model
        else:
            self.device = resolve_device(config)
            self.loaded = load_model(
                str(model),
                device=self.device.torch_device,
                dtype=config.dtype,
                backend=config.backend,
                kv_cache_dtype=config.kv_cache_dtype,
                kv_key_bias=config.kv_key_bias,
                max_model_len=config.max_model_len,
                quantization=config.quantization,
                quantize_head=config.quantize_head,
                progress=progress,
            )
        check_loaded(config, self.loaded)
        self.model_config = self.loaded.config
        self.tokenizer = self.loaded.tokenizer
        fmt = self.loaded.model.fmt
        calibration = self._calibrate(calibration_text) if isinstance(fmt, AdaptiveFormat) else None
        sensitivity = None if calibration is None else calibration.noise_L.tolist()
        limits = resolve_limits(
            config, self.model_config, fmt, self.device, sensitivity=sensitivity
        )
        self.max_model_len = limits.max_model_len
        warn_if_slow(
            fmt.codec.name, device_kind=self.device.kind, max_model_len=limits.max_model_len
        )
        self.max_num_seqs = limits.max_num_seqs
        self.pool = self._new_pool(limits, calibration)
        fidelity = self.pool.fidelity
        scheduler = Scheduler(
            PageAllocator(limits.num_pages, config.enable_prefix_caching, listener=fidelity),
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_prefill_tokens=config.max_prefill_tokens,
            max_queue=config.max_queue,
            max_model_len=limits.max_model_len,
            on_release=_nothing if fidelity is None else fidelity.leave,
            cache_scope=(self.loaded.name, str(self.loaded.dtype), fmt.codec.name),
        )
        self.expert_load = ExpertLoad.of(self.loaded.model)
        runner = Runner(
            self.loaded.model,
            self.pool,
            sample=self.loaded.model.ops.sample,
            vocab_size=self.model_config.vocab_size,
            device=self.device.torch_device,
            expert_load=self.expert_load,
            **self._graphs(),
        )
        self.engine = Engine(scheduler, runner, cache_use=self.pool.use)

    def _new_pool(self, limits: Limits, calibration: KeyCalibration | None) -> KVPool:
        model, fmt = self.loaded.model, self.loaded.model.fmt
        shape: dict[str, Any] = {
            "num_layers": self.model_config.num_layers,
            "num_kv_heads": self.model_config.num_kv_heads,
            "device": self.device.torch_device,
        }
        if limits.adaptive is None:
            return PagePool(num_pages=limits.num_pages, fmt=fmt, **shape)
        assert isinstance(fmt, AdaptiveFormat), type(fmt)
        outlier_LGO = None
        if limits.adaptive.num_outliers:
            if calibration is None:
                asked, allowed = self.config.kv_outlier_channels, "0 without a calibration of keys"
                raise refuse(ConfigError, "kv_outlier_channels", asked, allowed)
            outlier_LGO = calibration.outlier_LGD[..., : limits.adaptive.num_outliers]
        return AdaptivePool(
            fmt=fmt,
            plan=limits.adaptive.plan,
            num_sinks=limits.adaptive.num_sinks,
            outlier_LGO=outlier_LGO,
            window=limits.adaptive.window,
            demote=model.ops.demote_values,
            max_rows=limits.max_num_seqs + SIZE_STEP - 1,
            max_model_len=limits.max_model_len,
            max_step_tokens=self.config.max_num_batched_tokens,
            **shape,
        )

    def _calibrate(self, text: str | None) -> KeyCalibration | None:
        """Learn from a text how to store keys, and store them so; None: the package's own."""
        asked, model = self.config.kv_calibration, self.loaded.model
        if asked == "none" or (asked is None and self.tokenizer is None):
            return None
        tokenizer = self._need_tokenizer("kv_calibration")
        token_ids = tokenizer.encode(shipped_text() if text is None else text)
        if asked is None and (
            max(token_ids) >= self.model_config.vocab_size or len(token_ids) < MIN_TOKENS
        ):
            # A tokenizer of a few words, as tests have, makes of any text what is none.
            logger.warning("kv_calibration: none, as the model's tokenizer does not know the text")
            return None
        found = calibrate_keys(model, token_ids, folder=cache_dir())
        found.apply(model)
        return found

    def _graphs(self) -> dict[str, Any]:
        """CUDA graphs of the runner, where steps can be captured: torch ops wait for the device."""
        model = self.loaded.model
        if self.device.kind != "cuda" or self.config.enforce_eager:
            return {}
        if "torch" in model.ops.backend.values():
            return {}
        max_batch = self.max_num_seqs
        reserve_bytes = max_step_bytes(self.config, self.model_config)
        settings: dict[str, Any] = {
            "sample": model.ops.sample,
            "max_model_len": self.max_model_len,
            "device": self.device.torch_device,
            # Graphs take memory for good, which prompts without a graph must still find.
            "capture": functools.partial(capture_cuda_graph, reserve_bytes=reserve_bytes),
        }
        return {
            "graphs": DecodeGraphs(
                model,
                self.pool,
                advance=model.ops.advance,
                max_batch=max_batch,
                expert_load=self.expert_load,
                **settings,
            ),
            "prefill_graphs": PrefillGraphs(model, self.pool, **settings),
        }

    def _encode(self, prompt: Prompt, params: SamplingParams, *, name: str) -> tuple[int, ...]:
        self._check_open()
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError(f"{name}: got an empty text; allowed: at least one character")
            prompt = self._need_tokenizer(name).encode(prompt)
        return self._check(prompt, params, name=name)

    def _encode_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams
    ) -> tuple[int, ...]:
        self._check_open()
        if not messages:
            raise RequestError("messages: got none; allowed: at least one")
        token_ids = self._need_tokenizer("messages").encode_chat(messages)
        return self._check(token_ids, params, name="messages")

    def _check(
        self, token_ids: Sequence[int], params: SamplingParams, *, name: str
    ) -> tuple[int, ...]:
        vocab_size = self.model_config.vocab_size
        checked = as_token_ids(token_ids, name=name, vocab_size=vocab_size)
        self.engine.scheduler.check_fits(len(checked), name=name)
        check_params(params, vocab_size=vocab_size)
        if params.stop:
            self._need_tokenizer("stop")
        return checked

    def _check_open(self) -> None:
        if not self._is_open:
            raise UserError("LLM: closed; allowed: calls before close()")

    def _need_tokenizer(self, name: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(f"{name}: got text, but the model has no tokenizer; allowed: ids")
        return self.tokenizer

    def _submit(self, token_ids: tuple[int, ...], params: SamplingParams) -> _Live:
        request = Request(
            request_id=f"request-{next(self._request_numbers)}",
            prompt_token_ids=token_ids,
            sampling=params,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            eos_token_ids=self.model_config.eos_token_ids,
        )
        tokenizer = self.tokenizer
        detokenizer = NoText() if tokenizer is None else tokenizer.stream(context=token_ids)
        output = TextOutput(detokenizer, params.stop, min_tokens=params.min_tokens)
        live = _Live(record=self.engine.add(request, output), output=output)
        self._live[request.request_id] = live
        return live

    def _complete(self, asked: list[tuple[tuple[int, ...], SamplingParams]]) -> list[Completion]:
        lives: list[_Live] = []
        try:
            for token_ids, params in asked:
                lives.append(self._submit(token_ids, params))
            while any(live.completion is None for live in lives):
                self._step()
        finally:
            for live in lives:
                self._drop(live)
        return [live.completion for live in lives if live.completion is not None]

    def _chunks(self, token_ids: tuple[int, ...], params: SamplingParams) -> Iterator[Chunk]:
        live = self._submit(token_ids, params)
        try:
            while live.completion is None or live.chunks:
                while not live.chunks:
                    self._step()
                yield live.chunks.popleft()
        finally:
            self._drop(live)

    def _step(self) -> None:
        """One step of the engine; its events go to whoever waits for them."""
        self._check_open()
        for event in self.engine.step():
            live = self._live.get(event.request_id)
            # A request that its caller gave up has no one left to tell.
            if live is not None:
                live.chunks.append(self._chunk(live, event))

    def _drop(self, live: _Live) -> None:
        request_id = live.record.sequence.request.request_id
        if self._live.pop(request_id, None) is not None and live.completion is None:
            self.engine.cancel(request_id)

    def _chunk(self, live: _Live, event: TokenEvent) -> Chunk:
        text = live.output.take()
        if event.finish_reason is not None:
            live.completion = self._completion(live, event)
        return Chunk(
            text=text,
            token_id=event.token_id,
            finish_reason=event.finish_reason,
            completion=live.completion,
            logprobs=event.logprobs,
        )

    def _completion(self, live: _Live, event: TokenEvent) -> Completion:
        record, sequence = live.record, live.record.sequence
        params = sequence.request.sampling
        assert event.finish_reason is not None
        return Completion(
            text=live.output.text,
            token_ids=tuple(sequence.token_ids[sequence.num_prompt :]),
            prompt_token_ids=sequence.request.prompt_token_ids,
            finish_reason=event.finish_reason,
            finish_detail=event.finish_detail,
            usage=Usage(
                prompt_tokens=sequence.num_prompt,
                completion_tokens=sequence.num_output,
                total_tokens=len(sequence.token_ids),
                cached_tokens=record.num_cached or 0,
            ),
            timings=record.timings,
            kv_cache_dtype=self.pool.fmt.codec.name,
            kv_true_bits=self.pool.bits(record.cache_use.num_bytes, record.num_kv_tokens),
            kv_full_page_bits=self.pool.full_page_bits,
            kv_bytes=record.cache_use.num_bytes,
            kv_pages=dict(record.cache_use.pages_by_kind),
            logprobs=None if params.logprobs is None else tuple(sequence.logprobs),
            prompt_logprobs=(
                None if params.prompt_logprobs is None else tuple(sequence.prompt_logprobs)
            ),
        )


def _nothing(_request_id: str) -> None:
    pass
