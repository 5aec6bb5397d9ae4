"""Who computes what in the next step: admission, prefill chunks, decode, preemption; no torch.

Order is arrival order throughout: every running sequence arrived before every waiting one, and
`running` is sorted. From that follow

- progress: the oldest sequence can take pages from all the others and `add` refuses what could not
  fit the pool alone, so each step moves at least the oldest on;
- bounded preemption: a sequence loses its pages only when an older one grows by a page, older ones
  are a fixed, finite set, and none of them grows past its last token.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial

from subten.cache.allocator import PageAllocator, page_salt
from subten.core import (
    PAGE_SIZE,
    Batch,
    BatchItem,
    FinishReason,
    OverloadError,
    Request,
    RequestError,
    Sequence,
    SequenceStatus,
)

BAD_LOGITS = -1
"""Stands for a token where the logits of a row were NaN or had no finite value."""

PROMPT_LOGPROBS_CHUNK = 128
"""Most tokens a step of a prompt whose log-probabilities are wanted: each has a row of logits."""


class Scheduler:
    """Sequences from `add` to `finish`, and the pages that they hold.

    A step is `schedule()`, then `commit(batch, tokens)`, then `finish` for those that ended. All
    pages that a sequence needs for the tokens it has are taken at its admission, so that a prefill
    once begun never waits for pages; after that it takes one page every PAGE_SIZE tokens, and that
    a step early while there are more than enough, so that the step after it can run ahead.
    `on_release(request_id)` is called before a sequence lets go of its pages.

    `max_prefill_tokens`, if given, bounds the prompt tokens of a step that decodes as well: it is
    how long a prompt may hold the tokens of others. With `max_queue` requests waiting, `add`
    refuses more with OverloadError. `cache_scope` names what besides tenant and tokens decides
    what is in a page: the model and the KV format.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_prefill_tokens: int | None = None,
        max_queue: int | None = None,
        cache_scope: tuple[str, ...] = (),
        on_release: Callable[[str], None] = lambda _request_id: None,
    ) -> None:
        assert 1 <= max_num_seqs <= max_num_batched_tokens, (max_num_seqs, max_num_batched_tokens)
        assert max_prefill_tokens is None or max_prefill_tokens >= 1, max_prefill_tokens
        assert max_queue is None or max_queue >= 1, max_queue
        self.allocator = allocator
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._max_prefill_tokens = max_prefill_tokens or max_num_batched_tokens
        self._max_queue = max_queue
        self._cache_scope = cache_scope
        self._on_release = on_release
        self.capacity = allocator.num_pages * PAGE_SIZE
        self.max_seq_len = min(max_model_len, self.capacity)
        self.waiting: OrderedDict[str, Sequence] = OrderedDict()
        self.running: OrderedDict[str, Sequence] = OrderedDict()
        self.num_preemptions = 0
        self._failed: list[tuple[Sequence, str]] = []
        self._num_releases = 0
        self._refused: tuple[str, int] | None = None

    @property
    def has_work(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self.waiting or self.running)

    def check_fits(self, num_prompt: int, *, name: str = "prompt") -> None:
        """Raise RequestError for a prompt that no state of the pool could serve."""
        if not 1 <= num_prompt < self.max_seq_len:
            limit = "max_model_len" if self.max_seq_len < self.capacity else "all the cache holds"
            raise RequestError(
                f"{name}: got {num_prompt} tokens; allowed: 1 to {self.max_seq_len - 1} (prompt "
                f"and output share {self.max_seq_len} tokens, {limit})"
            )

    def add(self, request: Request) -> Sequence:
        """Queue a request.

        RequestError where it can never fit or its id is in use, OverloadError where too many wait.
        """
        self.check_fits(len(request.prompt_token_ids))
        if self.find(request.request_id) is not None:
            raise RequestError(
                f"request_id: got {request.request_id!r}, which is in use; allowed: a fresh id"
            )
        if self._max_queue is not None and len(self.waiting) >= self._max_queue:
            raise OverloadError(
                f"queue: {len(self.waiting)} requests are waiting; allowed: {self._max_queue}; "
                "try again later"
            )
        sequence = Sequence.from_request(request)
        self.waiting[request.request_id] = sequence
        return sequence

    def find(self, request_id: str) -> Sequence | None:
        """The waiting or running sequence of a request."""
        return self.running.get(request_id) or self.waiting.get(request_id)

    def schedule(self) -> Batch:
        """Choose the tokens of the next step: decoders first, then prefills, then admissions.

        At most `max_num_batched_tokens` tokens, so that a long prompt delays the decoders beside
        it by one chunk a step and no more. Preempts and admits as a side effect. Sequences that
        could not get their pages for another reason than too few are told by `take_failed`.
        """
        num_preemptions = self.num_preemptions
        items: list[BatchItem] = []
        budget = self.max_num_batched_tokens
        for sequence in list(self.running.values()):
            if sequence.num_uncomputed == 1 and self._grow(sequence):
                items.append(_chunk(sequence, budget))
                budget -= 1
        if items:
            budget = min(budget, self._max_prefill_tokens)
        for sequence in self.running.values():
            if sequence.num_uncomputed > 1 and budget > 0:
                items.append(_chunk(sequence, budget))
                budget -= items[-1].num_tokens
        while budget > 0 and self.num_preemptions == num_preemptions:
            admitted = self._admit()
            if admitted is None:
                break
            items.append(_chunk(admitted, budget))
            budget -= items[-1].num_tokens
        assert items or self._failed or not self.has_work, (len(self.running), len(self.waiting))
        return Batch(items=tuple(items), meanwhile=partial(self._hash_pages, items))

    def take_failed(self) -> list[tuple[Sequence, str]]:
        """Sequences that `schedule` had to leave out and why; end them with `finish`."""
        failed, self._failed = self._failed, []
        return failed

    def commit(self, batch: Batch, tokens: Items[int | None]) -> None:
        """Record what a step computed; `tokens` as `Runner.run` returns them.

        An item with BAD_LOGITS does not move on and its pages are not made known to others.
        """
        assert len(tokens) == len(batch.items), (len(tokens), len(batch.items))
        for item, token in zip(batch.items, tokens, strict=True):
            sequence = item.sequence
            assert (token is None) == (not item.needs_token) or token == BAD_LOGITS, (token, item)
            if token == BAD_LOGITS:
                continue
            sequence.num_computed += item.num_tokens
            # Only now: finite logits at its last token show that the pages before it are sound.
            if sequence.num_computed // PAGE_SIZE > item.start // PAGE_SIZE:
                self._hash_pages([item])
                self.allocator.commit(
                    sequence.page_ids,
                    sequence.token_ids,
                    num_tokens=sequence.num_computed,
                    salt=self._salt(sequence),
                    keys=sequence.page_keys,
                )
            if token is not None:
                sequence.token_ids.append(token)
            sequence.check_ladder()

    def finish(self, sequence: Sequence, reason: FinishReason, detail: str = "") -> None:
        """End a waiting or running sequence and free its pages."""
        request_id = sequence.request.request_id
        if sequence.status is SequenceStatus.RUNNING:
            del self.running[request_id]
        else:
            assert sequence.status is SequenceStatus.WAITING, sequence.status
            del self.waiting[request_id]
        self._release(sequence, forget=reason is FinishReason.ERROR)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        sequence.finish_detail = detail

    def check_integrity(self) -> None:
        """Assert every invariant of sequences, order and pages."""
        self.allocator.check_integrity()
        assert not self.running.keys() & self.waiting.keys()
        assert len(self.running) <= self.max_num_seqs, (len(self.running), self.max_num_seqs)
        holders: Counter[int] = Counter()
        for sequence in self.running.values():
            assert sequence.status is SequenceStatus.RUNNING, sequence.status
            assert len(sequence.token_ids) <= self.max_seq_len, sequence.token_ids
            sequence.check_ladder()
            assert len(set(sequence.page_ids)) == len(sequence.page_ids), sequence.page_ids
            holders.update(sequence.page_ids)
        for sequence in self.waiting.values():
            assert sequence.status is SequenceStatus.WAITING, sequence.status
            assert not sequence.page_ids, sequence.page_ids
            assert sequence.num_computed == 0, sequence.num_computed
        for page_id in range(self.allocator.num_pages):
            counted = self.allocator.num_holders(page_id)
            assert counted == holders[page_id], (page_id, counted, holders[page_id])

    def _grow(self, sequence: Sequence) -> bool:
        """Give a decoder the page that its next token needs; False if it was preempted or waits."""
        if sequence.status is not SequenceStatus.RUNNING:
            return False
        while len(sequence.page_ids) < _num_pages(len(sequence.token_ids)):
            page_ids = self._allocate(1, sequence)
            if self._failed and self._failed[-1][0] is sequence:
                return False
            if page_ids is not None:
                sequence.page_ids.extend(page_ids)
                continue
            youngest = next(reversed(self.running.values()))
            if youngest is sequence:
                # It keeps its pages and waits: an older one may yet end and leave it room.
                assert len(self.running) > 1, (len(sequence.token_ids), self.capacity)
                return False
            self._preempt(youngest)
        if not self._may_take_early(sequence):
            return True
        page_ids = self._allocate(1, sequence)
        sequence.page_ids.extend(page_ids or ())
        return page_ids is not None

    def _may_take_early(self, sequence: Sequence) -> bool:
        """Whether a sequence will need one more page in the next step, and nobody else this one."""
        num_tokens = len(sequence.token_ids)
        return (
            num_tokens == len(sequence.page_ids) * PAGE_SIZE
            and sequence.num_output + 1 < sequence.request.sampling.max_tokens
            and num_tokens + 1 < self.max_seq_len
            and self.allocator.num_available > len(self.running)
        )

    def _preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to the queue; its tokens stay, its pages go."""
        request_id = sequence.request.request_id
        del self.running[request_id]
        self._release(sequence)
        sequence.num_cached = sequence.num_computed = 0
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting[request_id] = sequence
        self.waiting.move_to_end(request_id, last=False)

    def _admit(self) -> Sequence | None:
        """Start the oldest waiting sequence if it and one page of growth for each other fit."""
        if not self.waiting or len(self.running) >= self.max_num_seqs:
            return None
        request_id, sequence = next(iter(self.waiting.items()))
        # Its pages are looked up again only when there can be more room than the last time.
        attempt = (request_id, self._num_releases)
        if self._refused == attempt and self.running:
            return None
        shared = self._match_prefix(sequence)
        num_missing = _num_pages(len(sequence.token_ids)) - len(shared)
        if num_missing + len(self.running) > self.allocator.num_available:
            self._refused = attempt
            self.allocator.release(shared)
            return None
        missing = self._allocate(num_missing, sequence)
        if missing is None:
            self.allocator.release(shared)
            return None
        sequence.page_ids = shared + missing
        sequence.num_cached = sequence.num_computed = len(shared) * PAGE_SIZE
        sequence.status = SequenceStatus.RUNNING
        del self.waiting[request_id]
        self.running[request_id] = sequence
        return sequence

    def _match_prefix(self, sequence: Sequence) -> list[int]:
        if sequence.wants_prompt_logprobs:
            # Pages hold keys and values: logits of their tokens come from computing them alone.
            return []
        # The last token is always computed: its logits are what the step is for.
        return self.allocator.match_prefix(
            sequence.token_ids[:-1], salt=self._salt(sequence), keys=sequence.page_keys
        )

    def _hash_pages(self, items: Items[BatchItem]) -> None:
        """Hash the pages that a step fills: meanwhile, so that `commit` need not, or in it."""
        for item in items:
            sequence, end = item.sequence, item.start + item.num_tokens
            if end // PAGE_SIZE > len(sequence.page_keys):
                self.allocator.add_keys(
                    sequence.page_keys,
                    sequence.token_ids,
                    num_tokens=end,
                    salt=self._salt(sequence),
                )

    def _salt(self, sequence: Sequence) -> str:
        return page_salt(sequence.request.tenant, *self._cache_scope)

    def _allocate(self, num_pages: int, sequence: Sequence) -> list[int] | None:
        """Pages, or None where there are too few or none could be had, which `_failed` tells."""
        try:
            return self.allocator.allocate(num_pages)
        # A fault in the accounting of pages ends one request and no other.
        except Exception as error:  # noqa: BLE001
            detail = f"its pages could not be had: {type(error).__name__}: {error}"
            self._failed.append((sequence, detail))
            return None

    def _release(self, sequence: Sequence, *, forget: bool = False) -> None:
        self._num_releases += 1
        self._on_release(sequence.request.request_id)
        self.allocator.release(sequence.page_ids, forget=forget)
        sequence.page_ids = []


def _num_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_SIZE)


def _chunk(sequence: Sequence, budget: int) -> BatchItem:
    if sequence.wants_prompt_logprobs:
        budget = min(budget, PROMPT_LOGPROBS_CHUNK)
    return BatchItem(
        sequence=sequence,
        start=sequence.num_computed,
        num_tokens=min(budget, sequence.num_uncomputed),
    )
