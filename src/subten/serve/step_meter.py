"""How near a decode step comes to the memory's roof, and where its experts' load lies."""

from __future__ import annotations

from collections import deque
from statistics import median

from subten.core import PAGE_SIZE
from subten.engine.expert_load import LoadSummary
from subten.engine.llm import LLM
from subten.engine.traffic import weight_bytes_of_step
from subten.models.decoder import Decoder

NUM_STEPS = 33
"""Step times are the median of so many."""


class StepMeter:
    """Times steps as the loop makes them, and reckons the bytes that they read.

    `roof_bytes_per_s` is the bandwidth of reading this device's memory, None where it is not known.
    A step is timed from the end of the one before it, so that what lies between two counts too.
    """

    def __init__(self, llm: LLM, roof_bytes_per_s: float | None) -> None:
        self._llm = llm
        self._roof_bytes_per_s = roof_bytes_per_s
        self._times_s: deque[float] = deque(maxlen=NUM_STEPS)
        self._batch_size = 0
        self._last_s: float | None = None
        self._fixed_bytes = self._expert_bytes = 0.0
        model = llm.loaded.model
        if isinstance(model, Decoder):
            none, one = (
                weight_bytes_of_step(model, batch_size=1, experts_per_layer=number)
                for number in (0.0, 1.0)
            )
            self._fixed_bytes, self._expert_bytes = none, one - none

    def stepped(self, end_s: float, batch_size: int, num_tokens: int) -> None:
        """A step of `batch_size` sequences has ended; only those of a token each are timed."""
        is_decode = num_tokens == batch_size > 0
        if batch_size != self._batch_size or not is_decode:
            self._times_s.clear()
            self._batch_size = batch_size
        elif self._last_s is not None:
            self._times_s.append(end_s - self._last_s)
        self._last_s = end_s if is_decode else None

    def idle(self) -> None:
        """Nothing runs: the time until the next step is not the step's."""
        self._last_s = None

    @property
    def step_s(self) -> float | None:
        """Time of a decode step of the sequences that run; None before two of them."""
        return median(self._times_s) if self._times_s else None

    def load(self) -> LoadSummary | None:
        """How evenly experts are used; None for a model without them, and before any step."""
        return None if self._llm.expert_load is None else self._llm.expert_load.summary()

    def roof_fraction(self, load: LoadSummary | None) -> float | None:
        """Time at the roof for the bytes of a decode step, over its time; None if unknown."""
        step_s = self.step_s
        if step_s is None or self._roof_bytes_per_s is None or not self._fixed_bytes:
            return None
        experts = 1.0 if load is None else load.experts_a_step
        num_bytes = self._fixed_bytes + experts * self._expert_bytes + self._cache_bytes()
        return num_bytes / self._roof_bytes_per_s / step_s

    def _cache_bytes(self) -> float:
        """What the step reads of the cache: a page that two share is read twice."""
        total = 0.0
        for sequence in self._llm.engine.scheduler.running.values():
            if sequence.page_ids:
                share = sequence.num_computed / (len(sequence.page_ids) * PAGE_SIZE)
                total += self._llm.pool.use(sequence.page_ids).num_bytes * share
        return total
