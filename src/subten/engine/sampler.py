"""From logits to tokens: who is sampled as the model says, and who changes its logits before.

Letters: S sequences, V vocabulary, W words of 32 tokens, T tokens of a prompt's chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from subten.core import (
    BatchItem,
    ErrorCause,
    Fault,
    LogitsMask,
    RequestError,
    Sequence,
    TokenLogprobs,
    no_fault,
    panics_as_errors,
)
from subten.engine.logprobs import read_logprobs
from subten.engine.scheduler import BAD_LOGITS
from subten.kernels.sample import SamplingTensors

Words = npt.NDArray[np.int32]


@dataclass(slots=True)
class _TokenCounts:
    """What penalties know of one sequence: tokens of its prompt, and counts of its output."""

    prompt_mask_V: torch.Tensor
    output_count_V: torch.Tensor
    num_counted: int


@dataclass(slots=True)
class _MaskState:
    """The words that the mask of one request gave for output token `index`."""

    words_W: Words
    index: int


class Sampler:
    """Chooses tokens and reads log-probabilities; keeps a little for each request till `forget`."""

    def __init__(
        self,
        sample: Callable[..., Any],
        *,
        vocab_size: int,
        device: torch.device,
        fault: Fault = no_fault,
    ) -> None:
        self._sample = sample
        self._vocab_size = vocab_size
        self._device = device
        self._fault = fault
        self._counts: dict[str, _TokenCounts] = {}
        self._biases: dict[str, torch.Tensor] = {}
        self._allowed: dict[str, Words] = {}
        self._masks: dict[str, _MaskState] = {}

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request that ended."""
        for kept in (self._counts, self._biases, self._allowed, self._masks):
            kept.pop(request_id, None)

    def prepare(self, items: list[BatchItem]) -> None:
        """Ask the masks of those that have one, while the device computes their logits."""
        for item in items:
            if item.needs_token and item.sequence.request.mask is not None:
                self._words(item.sequence)

    def choose(
        self, logits_SV: torch.Tensor, items: list[BatchItem], sampled: list[int] | None = None
    ) -> list[int]:
        """A token or BAD_LOGITS for each item, and its log-probabilities where they are asked for.

        `sampled`, if given, are the tokens of those that change nothing about their logits.
        """
        needs = [i.needs_token and i.sequence.request.changes_logits(_index(i)) for i in items]
        changed = [row for row, is_needed in enumerate(needs) if is_needed]
        plain = [row for row, is_needed in enumerate(needs) if not is_needed]
        tokens = [BAD_LOGITS] * len(items) if sampled is None else list(sampled)
        for rows, is_changed in ((changed, True), (plain if sampled is None else [], False)):
            if rows:
                own = [items[row].sequence for row in rows]
                drawn = self._draw(_rows(logits_SV, rows), own, is_changed=is_changed)
                for row, token in zip(rows, drawn, strict=True):
                    tokens[row] = token
        self._add_logprobs(logits_SV, items, tokens)
        return tokens

    def read_prompt(self, logits_TV: torch.Tensor, item: BatchItem) -> bool:
        """Add the log-probabilities of the prompt tokens that follow those of a chunk.

        logits_TV has a row for each token of the chunk. False where a row cannot be read.
        """
        sequence = item.sequence
        num_top = sequence.request.sampling.prompt_logprobs
        assert num_top is not None
        # A preempted prompt is computed again from its beginning.
        first = max(item.start, len(sequence.prompt_logprobs))
        end = min(item.start + item.num_tokens, sequence.num_prompt - 1)
        if first >= end:
            return True
        found = read_logprobs(
            logits_TV[first - item.start : end - item.start],
            sequence.token_ids[first + 1 : end + 1],
            [num_top] * (end - first),
        )
        good = [logprobs for logprobs in found if logprobs is not None]
        if len(good) < len(found):
            return False
        sequence.prompt_logprobs.extend(good)
        return True

    def _add_logprobs(
        self, logits_SV: torch.Tensor, items: list[BatchItem], tokens: list[int]
    ) -> None:
        asked = [(item.sequence.request.sampling.logprobs, item) for item in items]
        rows = [
            row
            for row, (num_top, item) in enumerate(asked)
            if num_top is not None and item.needs_token and tokens[row] != BAD_LOGITS
        ]
        if not rows:
            return
        found = read_logprobs(
            _rows(logits_SV, rows),
            [tokens[row] for row in rows],
            [asked[row][0] or 0 for row in rows],
        )
        for row, logprobs in zip(rows, found, strict=True):
            assert isinstance(logprobs, TokenLogprobs), (row, tokens[row])
            items[row].sequence.logprobs.append(logprobs)

    def _draw(
        self, logits_SV: torch.Tensor, sequences: list[Sequence], *, is_changed: bool
    ) -> list[int]:
        tensors = self._tensors(sequences)
        failed: set[int] = set()
        if is_changed:
            tensors = replace(tensors, **self._changes(sequences))
            failed = {row for row, sequence in enumerate(sequences) if sequence.failure}
        self._fault("sample")
        token_S, is_ok_S = self._sample(logits_SV, tensors)
        drawn: list[int] = torch.where(is_ok_S, token_S, BAD_LOGITS).tolist()
        return [BAD_LOGITS if row in failed else token for row, token in enumerate(drawn)]

    def _tensors(self, sequences: list[Sequence]) -> SamplingTensors:
        """How each row is sampled, as the model says."""
        params = [sequence.request.sampling for sequence in sequences]
        numbers = self._tensor(
            [
                [p.temperature for p in params],
                [p.top_p for p in params],
                [p.min_p for p in params],
            ],
            torch.float32,
        )
        # Integers travel apart: float32 would round seeds, and equal seeds must stay equal.
        integers = self._tensor(
            [
                [sequence.request.seed for sequence in sequences],
                [sequence.num_output for sequence in sequences],
            ],
            torch.int64,
        )
        return SamplingTensors(
            temperature_S=numbers[0],
            top_p_S=numbers[1],
            min_p_S=numbers[2],
            top_k_S=self._tensor([p.top_k for p in params], torch.int32),
            seed_S=integers[0],
            index_S=integers[1],
        )

    def _changes(self, sequences: list[Sequence]) -> dict[str, torch.Tensor]:
        """Fields of `SamplingTensors` that change logits; a kind that no row needs is left out."""
        params = [sequence.request.sampling for sequence in sequences]
        changes: dict[str, torch.Tensor] = {}
        if any(p.has_penalties for p in params):
            counts = [self._count(sequence) for sequence in sequences]
            numbers = self._tensor(
                [
                    [p.repetition_penalty for p in params],
                    [p.presence_penalty for p in params],
                    [p.frequency_penalty for p in params],
                ],
                torch.float32,
            )
            changes["repetition_S"], changes["presence_S"], changes["frequency_S"] = numbers
            changes["prompt_mask_SV"] = torch.stack([c.prompt_mask_V for c in counts])
            changes["output_count_SV"] = torch.stack([c.output_count_V for c in counts])
        if any(p.logit_bias is not None for p in params):
            changes["bias_SV"] = torch.stack([self._bias(sequence) for sequence in sequences])
        if any(sequence.request.has_mask(sequence.num_output) for sequence in sequences):
            words_SW = np.stack([self._words(sequence) for sequence in sequences])
            changes["mask_SW"] = self._tensor(words_SW, torch.int32)
        return changes

    def _count(self, sequence: Sequence) -> _TokenCounts:
        """Bring the counts of a sequence up to its last token; usually one token to add."""
        request_id = sequence.request.request_id
        counts = self._counts.get(request_id)
        if counts is None:
            prompt = self._tensor(sequence.token_ids[: sequence.num_prompt], torch.int64)
            prompt_mask_V = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            prompt_mask_V[prompt] = True
            counts = self._counts[request_id] = _TokenCounts(
                prompt_mask_V=prompt_mask_V,
                output_count_V=torch.zeros_like(prompt_mask_V, dtype=torch.int32),
                num_counted=sequence.num_prompt,
            )
        fresh = self._tensor(sequence.token_ids[counts.num_counted :], torch.int64)
        one = torch.ones_like(fresh, dtype=torch.int32)
        counts.output_count_V.index_add_(0, fresh, one)
        counts.num_counted = len(sequence.token_ids)
        return counts

    def _bias(self, sequence: Sequence) -> torch.Tensor:
        request_id = sequence.request.request_id
        bias_V = self._biases.get(request_id)
        if bias_V is None:
            bias_V = torch.zeros(self._vocab_size, device=self._device)
            given = sequence.request.sampling.logit_bias
            if given:
                at = self._tensor(list(given), torch.int64)
                bias_V[at] = self._tensor(list(given.values()), torch.float32)
            self._biases[request_id] = bias_V
        return bias_V

    def _words(self, sequence: Sequence) -> Words:
        """Words of the tokens that a sequence may choose next; says so in it if its mask fails."""
        request = sequence.request
        words_W = self._allowed_words(sequence)
        if request.mask is not None and not sequence.failure:
            try:
                with panics_as_errors():
                    words_W = words_W & self._mask_words(request.mask, sequence)
            except RequestError as error:
                sequence.failure, sequence.failure_cause = str(error), ErrorCause.MASK
                return words_W
            # Whatever else a mask raises is the matter of its own request alone, too.
            except Exception as error:  # noqa: BLE001
                sequence.failure = f"the mask failed: {type(error).__name__}: {error}"
                return words_W
        if sequence.num_output < request.sampling.min_tokens:
            words_W = self._without_ends(words_W, sequence)
        if request.mask is not None and not sequence.failure and not words_W.any():
            sequence.failure = (
                "no token is left: the mask, allowed_token_ids, and stop_token_ids before "
                "min_tokens exclude each one"
            )
            sequence.failure_cause = ErrorCause.MASK
        return words_W

    def _without_ends(self, words_W: Words, sequence: Sequence) -> Words:
        """Words of tokens that do not end a sequence; those of its end where a mask has no other.

        A stop token is no end of a mask: what it allows would be cut there.
        """
        request = sequence.request
        longer_W = words_W & ~self._pack_known(request.end_token_ids)
        if request.mask is None or longer_W.any():
            return longer_W
        return words_W & self._pack_known(request.eos_token_ids)

    def _pack_known(self, token_ids: tuple[int, ...]) -> Words:
        known = [token_id for token_id in token_ids if token_id < self._vocab_size]
        return _pack(known, -(-self._vocab_size // 32))

    def _allowed_words(self, sequence: Sequence) -> Words:
        request_id = sequence.request.request_id
        words_W = self._allowed.get(request_id)
        if words_W is None:
            num_words = -(-self._vocab_size // 32)
            token_ids = sequence.request.sampling.allowed_token_ids
            everything = np.full(num_words, -1, dtype=np.int32)
            words_W = everything if token_ids is None else _pack(token_ids, num_words)
            self._allowed[request_id] = words_W
        return words_W

    def _mask_words(self, mask: LogitsMask, sequence: Sequence) -> Words:
        """Each output token is told to the mask once, also where a step is run again."""
        state = self._masks.get(sequence.request.request_id)
        output = sequence.token_ids[sequence.num_prompt :]
        if state is None or state.index < len(output):
            news: list[int | None] = [None] if state is None else []
            for token_id in news + output[0 if state is None else state.index :]:
                self._fault("mask")
                given = mask.next_mask(token_id)
            words_W = np.array(given).reshape(-1)
            num_words = -(-self._vocab_size // 32)
            if words_W.dtype not in (np.int32, np.uint32) or len(words_W) != num_words:
                got = f"{len(words_W)} of {words_W.dtype}"
                raise ValueError(f"got {got}; allowed: {num_words} words of 32 bits")
            state = _MaskState(words_W.view(np.int32), len(output))
            self._masks[sequence.request.request_id] = state
        return state.words_W

    def _tensor(self, values: Any, dtype: torch.dtype) -> torch.Tensor:
        self._fault("copy.in")
        return torch.as_tensor(values, dtype=dtype).to(self._device, non_blocking=True)


def _index(item: BatchItem) -> int:
    return item.sequence.num_output


def _rows(logits_SV: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return logits_SV if len(rows) == len(logits_SV) else logits_SV[rows]


def _pack(token_ids: Any, num_words: int) -> Words:
    """Words with the bits of `token_ids` set, lowest bit first."""
    bits = np.zeros(num_words * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    words: Words = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
    return words
