"""Launch choices of `attend`: tile shape, and how many programs share one sequence's pages."""

from __future__ import annotations

from dataclasses import dataclass

from subten.codecs import KVFormat
from subten.core import PAGE_SIZE
from subten.kernels.step import QUERY_TILE


@dataclass(frozen=True, kw_only=True, slots=True)
class AttendPlan:
    """Launch choices of one `attend` call.

    A tile is `tile_tokens` query tokens x `block_heads` heads of one KV head in `block_rows` rows.
    A sequence of n pages is cut into ceil(n / max(min_pages, ceil(n / num_splits))) splits; the
    grid has `grid_splits` of them, at least as many as any sequence of the step has.
    """

    tile_tokens: int
    block_heads: int
    head_blocks: int
    block_rows: int
    num_splits: int
    min_pages: int
    grid_splits: int
    num_warps: int
    num_stages: int
    merge_heads: int
    merge_warps: int


MAX_SPLITS = 64
"""More splits cost more in partial results than they win in parallel reads."""

PREFILL_SPLIT_PAGES = 8
"""Fewest pages of one split with many query tokens: prompts up to 512 tokens are never split, so
that their results do not depend on the batch."""

MAX_SPLIT_PAGES = 64
"""A program next to prefill tiles reads at most this many pages, or its step waits for it."""

MAX_PARTIAL_BYTES = 64 * 2**20
"""Memory that the partial results of one call may take."""


def plan_attend(
    *,
    num_sms: int,
    num_tiles: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    out_bytes: int,
    is_float32: bool,
    max_query_len: int,
    max_kv_len: int,
    max_rows: int | None = None,
) -> AttendPlan:
    """Choose tile and splits from host integers alone; `out_bytes` is the size of an FP32 output.

    Decode (single tokens) has three tiers by the number of unsplit programs: less than one an SM,
    less than four, more. Within a tier the split of a sequence depends on its own length alone,
    so that its result does too. A captured graph holds for every length up to `max_kv_len`.
    A tile of BF16 queries has as many rows as fit in registers, and at most `max_rows`.
    """
    is_decode = max_query_len == 1
    tile_tokens = 1 if is_decode else QUERY_TILE
    # FP32 dots run on FMA units with operands in registers: a taller tile spills. So does the
    # accumulator of 128 rows at head_dim 256 (255 registers and 800 bytes of stack for int4).
    if is_float32:
        max_rows = 32 if head_dim <= 64 else 16
    else:
        in_registers = 128 if head_dim <= 128 else 64
        max_rows = in_registers if max_rows is None else min(in_registers, max_rows)
    block_heads = min(_power_of_two_from(group), max_rows // tile_tokens)
    head_blocks = -(-group // block_heads)
    programs = num_tiles * num_kv_heads * head_blocks
    if not is_decode and num_sms // 2 < programs <= num_sms and block_heads * tile_tokens == 128:
        # Two programs an SM, so that one computes while the other waits.
        block_heads, head_blocks, programs = block_heads // 2, 2 * head_blocks, 2 * programs
    max_pages = -(-max_kv_len // PAGE_SIZE)
    if is_decode:
        min_pages = 1
        if programs < num_sms:
            num_splits = 2 * num_sms // (num_kv_heads * head_blocks)
        else:
            num_splits = 4 if programs < 4 * num_sms else 1
    else:
        min_pages = PREFILL_SPLIT_PAGES
        num_splits = max(num_sms // programs, -(-max_pages // MAX_SPLIT_PAGES))
        num_splits = min(num_splits, MAX_PARTIAL_BYTES // out_bytes)
    num_splits = max(1, min(num_splits, MAX_SPLITS))
    block_rows = max(16, tile_tokens * block_heads)
    return AttendPlan(
        tile_tokens=tile_tokens,
        block_heads=block_heads,
        head_blocks=head_blocks,
        block_rows=block_rows,
        num_splits=num_splits,
        min_pages=min_pages,
        grid_splits=max(1, min(num_splits, -(-max_pages // min_pages))),
        num_warps=8 if is_float32 or block_rows >= 128 or head_dim > 128 else 4,
        num_stages=1 if is_float32 else 2,
        merge_heads=4,
        merge_warps=4,
    )


LARGEST_BLOCK_BYTES = 227 * 1024
"""Shared memory of a block of an H200, where plans were measured: it has room for their stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockRoom:
    """What `attend` over pages of `fmt` can hold in the `shared_bytes` of a block.

    Bounds on what Triton 3.9 takes for compute capability 8.9. In flight, where the loop has two
    stages: a page, and for each of its numbers 7 bytes of codewords and 6 of a bias's angles.
    """

    fmt: KVFormat
    has_bias: bool
    shared_bytes: int

    @property
    def max_rows(self) -> int:
        """Rows of a tile, a power of two, beside the keys of a page."""
        keys_bytes = max(2 * PAGE_SIZE * self._block_d, self.fmt.page_bytes // 2)
        rows = max(16, (self.shared_bytes - keys_bytes) // self._row_bytes)
        return 1 << (rows.bit_length() - 1)

    def num_stages(self, plan: AttendPlan) -> int:
        """The plan's stages, or one."""
        has_tables = self.fmt.codec.tables is not None
        number_bytes = 2 + (7 if has_tables else 0) + (6 if self.has_bias else 0)
        in_flight = self.fmt.page_bytes + PAGE_SIZE * self._block_d * number_bytes
        fits = plan.block_rows * self._row_bytes + in_flight <= self.shared_bytes
        return plan.num_stages if fits or self.shared_bytes >= LARGEST_BLOCK_BYTES else 1

    def has_signs(self, plan: AttendPlan) -> bool:
        """Whether rows can be turned by a product with a matrix of signs, in BF16."""
        return 2 * self._block_d * (self._block_d + plan.block_rows) <= self.shared_bytes

    @property
    def _block_d(self) -> int:
        return _power_of_two_from(self.fmt.head_dim)

    @property
    def _row_bytes(self) -> int:
        return self._block_d * (6 if self.has_bias else 4)


def _power_of_two_from(number: int) -> int:
    return 1 << (number - 1).bit_length()
