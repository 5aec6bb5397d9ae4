"""Attention over a quantised paged cache, then routed experts, as one module of its own.

Letters: B sequences, T new tokens of each, D model width, P pages, G key-value heads. In
`pages_PGB` the B is the bytes of a page.
"""

from __future__ import annotations

import torch
from torch import nn

from subten.codecs import KVFormat, kv_format
from subten.codecs.rotation import hadamard
from subten.config import ModelConfig, RopeConfig
from subten.core import PAGE_SIZE, ConfigError, RequestError, refuse
from subten.device import on_device
from subten.kernels import select_ops
from subten.kernels.step import StepTensors, make_step
from subten.layers.decoder_layer import DecoderLayer
from subten.layers.linear import WeightSpec
from subten.layers.moe import MoE
from subten.layers.rope import cos_sin_table


class BlockCache:
    """The keys and values of a batch of sequences, encoded in pages of 64 tokens.

    Made by `FusedMoEQuantizedAttention.new_cache` and filled by its `forward`. A token is encoded
    once, when it comes; nothing that lies in the pages is written again. `lengths` holds the
    tokens of each sequence, `pages_PGB` uint8 [num_pages, num_kv_heads, page_bytes] the bytes.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        max_len: int,
        num_kv_heads: int,
        fmt: KVFormat,
        device: torch.device,
    ) -> None:
        self.batch_size = batch_size
        self.max_len = max_len
        self.fmt = fmt
        self.lengths = [0] * batch_size
        width = -(-max_len // PAGE_SIZE)
        self.page_ids = [list(range(s * width, (s + 1) * width)) for s in range(batch_size)]
        self.pages_PGB = torch.empty(
            (batch_size * width, num_kv_heads, fmt.page_bytes), dtype=torch.uint8, device=device
        )

    @property
    def bytes_used(self) -> int:
        """Bytes of the pages that hold tokens: codes, scales, zero-points and padding."""
        num_pages = sum(-(-length // PAGE_SIZE) for length in self.lengths)
        return num_pages * self.pages_PGB.shape[1] * self.fmt.page_bytes

    @property
    def true_bits(self) -> float | None:
        """Bits per cached element, every byte of a begun page counted; None while empty.

        Tends to `fmt.true_bits` as sequences fill their last page.
        """
        num_elements = sum(self.lengths) * self.pages_PGB.shape[1] * 2 * self.fmt.head_dim
        return self.bytes_used * 8 / num_elements if num_elements else None

    def reset(self, sequence: int | None = None) -> None:
        """Forget the tokens of one sequence, or of all, to begin again at position 0."""
        if sequence is None:
            self.lengths = [0] * self.batch_size
            return
        if not 0 <= sequence < self.batch_size:
            raise refuse(RequestError, "sequence", sequence, f"0 to {self.batch_size - 1}")
        self.lengths[sequence] = 0


class FusedMoEQuantizedAttention(nn.Module):
    """One transformer block for decoding: (x, cache) -> x after attention and routed experts.

    With h = RMSNorm(x): q, k, v are projected from h, rotary-embedded, k and v encoded by the KV
    codec `kv_cache_dtype` and appended to the cache's pages; attention reads the codes straight
    from the pages; its projected output is added to x. Then RMSNorm, router, softmax over all
    `num_experts`, the `top_k` best (renormalised if `norm_topk_prob`), and the weighted sum of
    their SwiGLU networks of width `d_ffn`, added to x again.

    On a GPU the steps are Triton kernels: norm with router, selection and expert order in one
    launch; rotary embedding, encoding and page write in one; the experts with their weighted sum
    and residual. On a CPU the same steps run in torch. `backend` auto, cuda, triton or torch.

    Weights start random, like those of `nn.Linear` normal with a variance of 1 / inputs; put your
    own in with `load_state_dict`: `layer.attention.qkv.weight.codes` [(num_heads + 2 *
    num_kv_heads) * head_dim, d_model], rows in the order q, k, v;
    `layer.attention.output.weight.codes` [d_model, num_heads * head_dim]; `layer.attention_norm_D`,
    `layer.ffn_norm_D` [d_model]; `layer.ffn.gate_ED` float32 [num_experts, d_model];
    `layer.ffn.gate_up_EFD.codes` [num_experts, 2 * d_ffn, d_model], gate rows first;
    `layer.ffn.down_EDF.codes` [num_experts, d_model, d_ffn]. The block is for inference: no
    gradient passes through it. In CUDA a single token's experts are chosen by a matrix made of
    these weights (`DecoderLayer.fold_router`), again whenever they change; only writes through
    `.data`, and to a block that was made in inference mode, are not seen.

    `head_dim` defaults to d_model / num_heads; `max_len` is the longest context that a cache may
    have; `device` and `dtype` are where and in what the block lives, for good. Raises ConfigError,
    naming the argument, for shapes that cannot be.
    """

    def __init__(
        self,
        *,
        d_model: int,
        num_heads: int,
        num_kv_heads: int,
        num_experts: int,
        top_k: int,
        d_ffn: int,
        head_dim: int | None = None,
        kv_cache_dtype: str = "int4",
        max_len: int = 4096,
        rope_theta: float = 10000.0,
        norm_eps: float = 1e-6,
        norm_topk_prob: bool = True,
        backend: str = "auto",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        sizes = {
            "d_model": d_model,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "num_experts": num_experts,
            "top_k": top_k,
            "d_ffn": d_ffn,
            "max_len": max_len,
        }
        head_dim = _check_sizes(sizes, head_dim)
        if dtype not in (torch.bfloat16, torch.float32):
            raise refuse(ConfigError, "dtype", dtype, "torch.bfloat16, torch.float32")
        self.device = torch.device(device)
        self.dtype = dtype
        self.config = ModelConfig(
            architecture="FusedMoEQuantizedAttention",
            num_layers=1,
            d_model=d_model,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            d_ffn=d_ffn,
            vocab_size=1,
            norm_eps=norm_eps,
            rope=RopeConfig(theta=rope_theta),
            max_model_len=max_len,
            tie_word_embeddings=True,
            num_experts=num_experts,
            top_k=top_k,
            norm_topk_prob=norm_topk_prob,
        )
        self.fmt = kv_format(kv_cache_dtype, head_dim)
        ops = select_ops(backend, self.device)
        self.layer = DecoderLayer(
            self.config, ops=ops, fmt=self.fmt, spec=WeightSpec(device=self.device, dtype=dtype)
        )
        self.cos_sin_PD = cos_sin_table(
            self.config.rope, head_dim=head_dim, max_len=max_len, device=self.device
        )
        is_rotated = self.fmt.codec.is_rotated
        self.rotation_DD = hadamard(head_dim, self.device) if is_rotated else None
        self._folded_of: tuple[tuple[int, int], ...] = ()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw fresh weights; norms become 1. `generator` must live on the block's device."""
        for parameter in self.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)

    def new_cache(self, batch_size: int, max_len: int | None = None) -> BlockCache:
        """An empty cache for `batch_size` sequences of at most `max_len` tokens each."""
        if batch_size < 1:
            raise refuse(ConfigError, "batch_size", batch_size, "an integer of at least 1")
        longest = self.config.max_model_len
        max_len = longest if max_len is None else max_len
        if not 1 <= max_len <= longest:
            raise refuse(ConfigError, "max_len", max_len, f"1 to {longest}, the block's max_len")
        return BlockCache(
            batch_size=batch_size,
            max_len=max_len,
            num_kv_heads=self.config.num_kv_heads,
            fmt=self.fmt,
            device=self.device,
        )

    @torch.no_grad()
    def forward(self, x_BTD: torch.Tensor, cache: BlockCache) -> torch.Tensor:
        """x_BTD [batch_size, T, d_model] -> the same shape; T new tokens of each sequence.

        Token t of sequence b stands at position `cache.lengths[b] + t` and sees all tokens before
        it and itself. Side effect: the T tokens are appended to `cache`. Raises RequestError,
        before anything is written, if x does not fit the block or the tokens do not fit the cache.
        """
        self._check_input(x_BTD, cache)
        self._fold_router()
        num_tokens = x_BTD.shape[1]
        step = self._step(cache, num_tokens)
        with on_device(self.device):
            x_TD = self.layer(
                x_BTD.reshape(-1, self.config.d_model),
                step,
                pages_PGB=cache.pages_PGB,
                cos_sin_PD=self.cos_sin_PD,
                rotation_DD=self.rotation_DD,
            )
        cache.lengths = [length + num_tokens for length in cache.lengths]
        return x_TD.view(x_BTD.shape)  # type: ignore[no-any-return]

    def _fold_router(self) -> None:
        """Before the first step, and where weights were written or replaced since.

        Writes through `.data`, or to weights made in inference mode, leave no trace to see.
        """
        layer, output = self.layer, self.layer.attention.output.weight
        assert isinstance(layer.ffn, MoE), type(layer.ffn)
        weights = (layer.ffn.gate_ED, layer.ffn_norm_D, *output.parameters())
        of = tuple((w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights)
        if of != self._folded_of:
            layer.fold_router()
            self._folded_of = of

    def _step(self, cache: BlockCache, num_tokens: int) -> StepTensors:
        """Positions and page slots; the token ids of the step are unused here."""
        return make_step(
            token_ids=[[0] * num_tokens] * cache.batch_size,
            starts=cache.lengths,
            page_ids=cache.page_ids,
            device=self.device,
        )

    def _check_input(self, x_BTD: torch.Tensor, cache: BlockCache) -> None:
        wanted = f"[{cache.batch_size}, 1 or more, {self.config.d_model}], {self.dtype}"
        got = f"{list(x_BTD.shape)}, {x_BTD.dtype}"
        if x_BTD.dim() != 3 or x_BTD.shape[1] < 1 or x_BTD.dtype != self.dtype:
            raise RequestError(f"x_BTD: got {got}; allowed: {wanted}")
        if x_BTD.shape[0] != cache.batch_size or x_BTD.shape[2] != self.config.d_model:
            raise RequestError(f"x_BTD: got {got}; allowed: {wanted}")
        if cache.fmt != self.fmt or cache.pages_PGB.shape[1] != self.config.num_kv_heads:
            raise RequestError(
                f"cache: got pages of {cache.fmt.codec.name} with {cache.pages_PGB.shape[1]} heads "
                f"of {cache.fmt.head_dim}; allowed: a cache made by this block's new_cache"
            )
        longest = max(cache.lengths)
        if longest + x_BTD.shape[1] > cache.max_len:
            raise RequestError(
                f"cache: {longest} cached and {x_BTD.shape[1]} new tokens make "
                f"{longest + x_BTD.shape[1]}; allowed: at most max_len = {cache.max_len}"
            )


def _check_sizes(sizes: dict[str, int], head_dim: int | None) -> int:
    """Refuse sizes that cannot be; return the head dimension."""
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise refuse(ConfigError, name, size, "an integer of at least 1")
    d_model, num_heads = sizes["d_model"], sizes["num_heads"]
    if sizes["num_experts"] > 1024:
        raise refuse(ConfigError, "num_experts", sizes["num_experts"], "1 to 1024")
    if sizes["top_k"] > sizes["num_experts"]:
        allowed = f"1 to num_experts = {sizes['num_experts']}"
        raise refuse(ConfigError, "top_k", sizes["top_k"], allowed)
    if num_heads % sizes["num_kv_heads"]:
        allowed = f"a divisor of num_heads = {num_heads}"
        raise refuse(ConfigError, "num_kv_heads", sizes["num_kv_heads"], allowed)
    if head_dim is not None:
        return head_dim
    if d_model % num_heads:
        raise refuse(ConfigError, "num_heads", num_heads, f"a divisor of d_model = {d_model}")
    return d_model // num_heads
