"""Text that the dense model writes itself, both sides of a conversation in its chat format.

An aligned model that is given the start of a user's turn alone writes the user's turn, and then
answers it (Magpie, Xu et al. 2024). Distilling on this text keeps what the model knows where no
training text of its own is at hand.
"""

# Letters: B conversations, S positions, D model width, H query heads, G key-value heads,
# P head dimension, V vocabulary, M tokens between the user's turn and the answer

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from subten.core import ConfigError
from subten.tokenizer import Tokenizer
from subten.train.config import TrainConfig
from subten.train.data import Array, Progress, save_array
from subten.train.dense import DenseModel, rotate

STARTERS = (
    "What is", "What are", "What does", "Why is", "Why do", "How do I", "How does", "How can I",
    "How many", "Who was", "Who is", "Where is", "When did", "Which", "Can you explain",
    "Can you tell me", "Could you write", "Explain", "Describe", "Tell me about", "Give me",
    "Write a short", "Write a", "List", "Summarize", "Is it", "Should I", "What is the capital of",
    "What is the difference between", "I would like to know", "Please help me", "Name three",
)  # fmt: skip
_MARK = "USERTURN"
_NUCLEUS = 256
_SLICE = 64


def self_written(
    model: DenseModel,
    tokenizer: Tokenizer,
    config: TrainConfig,
    model_key: str,
    progress: Progress | None = None,
) -> tuple[Array, Array]:
    """Token ids (flat) and lengths of the conversations that `config` asks for, kept on disk.

    The same model, settings and seed find the same file again.
    """
    settings = {
        n: v for n, v in config.to_dict().items() if n.startswith("self_") and n != "self_share"
    }
    key_text = json.dumps([settings, config.seed, model_key, str(model.dtype)], sort_keys=True)
    name = f"self-{hashlib.sha256(key_text.encode()).hexdigest()[:16]}"
    ids_file = config.data_folder / f"{name}.ids.npy"
    lengths_file = config.data_folder / f"{name}.lengths.npy"
    if not (ids_file.is_file() and lengths_file.is_file()):
        config.data_folder.mkdir(parents=True, exist_ok=True)
        ids, lengths = _write_all(model, tokenizer, config, progress)
        save_array(lengths_file, lengths)
        save_array(ids_file, ids)
    return np.load(ids_file), np.load(lengths_file)


def _write_all(
    model: DenseModel, tokenizer: Tokenizer, config: TrainConfig, progress: Progress | None
) -> tuple[Array, Array]:
    generator = torch.Generator(model.device).manual_seed(config.seed)
    rng = np.random.default_rng(config.seed)
    kept: list[Array] = []
    num_tokens, num_empty = 0, 0
    while num_tokens < config.self_tokens:
        prompts = _prompts(tokenizer, config, rng)
        written = write_conversations(
            model,
            prompts,
            bridge=_chat_parts(tokenizer)[1],
            end_ids=tokenizer.eos_token_ids,
            length=min(config.self_length, model.config.max_model_len),
            temperature=config.self_temperature,
            top_p=config.self_top_p,
            generator=generator,
        )
        num_empty = num_empty + 1 if not written else 0
        if num_empty == 3:
            raise ConfigError(
                "self_tokens: the model never ends a user's turn in its chat format; allowed: 0 "
                "for such a model, or a larger self_length"
            )
        kept.extend(written)
        num_tokens += sum(len(ids) for ids in written)
        if progress:
            progress("writing conversations", min(1.0, num_tokens / config.self_tokens))
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    flat = np.concatenate(kept).astype(dtype)
    return flat, np.array([len(ids) for ids in kept], dtype=np.int64)


@torch.no_grad()
def write_conversations(
    model: DenseModel,
    prompts: Sequence[Sequence[int]],
    *,
    bridge: Sequence[int],
    end_ids: Sequence[int],
    length: int,
    temperature: float,
    top_p: float,
    generator: torch.Generator,
) -> list[Array]:
    """Let the model go on from each prompt (a user's turn, begun) through one answer.

    When it ends the turn with `bridge[0]`, the rest of `bridge` (up to the answer's start) is put
    in, and it goes on until a token of `end_ids`. Conversations that never reach the answer within
    `length` tokens are dropped. All rows stand at the same position, so the cache is static.
    """
    num_rows, device = len(prompts), model.device
    num_bridge = len(bridge)
    answering, done, spoiled = num_bridge, num_bridge + 1, num_bridge + 2
    prompt_BS = torch.full((num_rows, length), -1, device=device)
    for row, ids in enumerate(prompts):
        prompt_BS[row, : len(ids)] = torch.tensor(ids[:length], device=device)
    bridge_M = torch.tensor([*bridge, 0, 0, 0], device=device)
    ends = torch.tensor(list(end_ids), device=device)
    cache = _Cache(model, num_rows, length)
    token_BS = torch.zeros((num_rows, length), dtype=torch.long, device=device)
    token_BS[:, 0] = prompt_BS[:, 0]
    phase_B = torch.zeros(num_rows, dtype=torch.long, device=device)
    length_B = torch.full((num_rows,), length, device=device)
    for position in range(length - 1):
        logits_BV = cache.step(token_BS[:, position], position)
        drawn_B = _sample(logits_BV, temperature, top_p, generator)
        given_B = prompt_BS[:, position + 1]
        in_bridge = (phase_B >= 1) & (phase_B < answering)
        next_B = torch.where(in_bridge, bridge_M[phase_B], drawn_B)
        next_B = torch.where(given_B >= 0, given_B, next_B)
        is_end = torch.isin(next_B, ends) & (given_B < 0)
        in_user = (phase_B == 0) & (given_B < 0)
        turned = in_user & (next_B == bridge_M[0])
        answered = (phase_B == answering) & is_end
        length_B = torch.where(answered, position + 2, length_B)
        phase_B = torch.where(in_bridge | turned, phase_B + 1, phase_B)
        phase_B = torch.where(answered, done, phase_B)
        phase_B = torch.where(in_user & is_end & ~turned, spoiled, phase_B)
        token_BS[:, position + 1] = next_B
        if position % 32 == 31 and bool((phase_B > answering).all()):
            break
    is_kept = ((phase_B == answering) | (phase_B == done)).tolist()
    rows, lengths = token_BS.cpu().numpy(), length_B.tolist()
    return [rows[i, : lengths[i]] for i in range(num_rows) if is_kept[i]]


class _Cache:
    """Keys and values of all layers (B G S P each), and one decoding step over them."""

    def __init__(self, model: DenseModel, num_rows: int, length: int) -> None:
        shape = model.shape
        self.model = model
        size = (num_rows, shape.num_kv_heads, length, shape.head_dim)
        self.keys = [model.embed_VD.new_zeros(size) for _ in model.layers]
        self.values = [model.embed_VD.new_zeros(size) for _ in model.layers]
        self.cos_SP, self.sin_SP = model.rope(length)
        self.place_S = torch.arange(length, device=model.device)

    def step(self, token_B: Tensor, position: int) -> Tensor:
        """Logits (B V) after one more token in every row."""
        model, shape = self.model, self.model.shape
        # Growing by slices keeps the shapes few and aligned and reads half the cache on average.
        stop = min(len(self.place_S), (position // _SLICE + 1) * _SLICE)
        hidden = self.place_S[:stop] > position
        x_BD = F.embedding(token_B, model.embed_VD)
        for i, layer in enumerate(model.layers):
            h_BD = F.rms_norm(x_BD, (shape.width,), layer.attn_norm_D, shape.norm_eps)
            heads = F.linear(h_BD, layer.qkv_weight).view(len(x_BD), -1, shape.head_dim)
            q, k, v = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
            cos_P, sin_P = self.cos_SP[position], self.sin_SP[position]
            self.keys[i][:, :, position] = rotate(k, cos_P, sin_P)
            self.values[i][:, :, position] = v
            q = rotate(q, cos_P, sin_P).unflatten(1, (shape.num_kv_heads, -1))
            score = q @ self.keys[i][:, :, :stop].transpose(-1, -2) * shape.head_dim**-0.5
            prob = score.masked_fill(hidden, -torch.inf).float().softmax(-1).to(x_BD.dtype)
            x_BD = x_BD + F.linear(
                (prob @ self.values[i][:, :, :stop]).flatten(1), layer.out_weight
            )
            h_BD = F.rms_norm(x_BD, (shape.width,), layer.ffn_norm_D, shape.norm_eps)
            gate, up = F.linear(h_BD, layer.gate_up_weight).chunk(2, dim=-1)
            x_BD = x_BD + F.linear(F.silu(gate) * up, layer.down_weight)
        x_BD = F.rms_norm(x_BD, (shape.width,), model.norm_D, shape.norm_eps)
        return F.linear(x_BD, model.head_VD)


def _sample(
    logits_BV: Tensor, temperature: float, top_p: float, generator: torch.Generator
) -> Tensor:
    top, id_BN = logits_BV.float().topk(min(_NUCLEUS, logits_BV.shape[-1]), dim=-1)
    prob = (top / temperature).softmax(-1)
    cumulative = prob.cumsum(-1)
    is_kept = (cumulative - prob < top_p) | (torch.arange(prob.shape[-1], device=top.device) == 0)
    cumulative = torch.where(is_kept, prob, 0.0).cumsum(-1)
    size = (len(top), 1)
    level = torch.rand(size, generator=generator, device=top.device) * cumulative[:, -1:]
    # Rounding may put the level on the total: never past the last token of the nucleus.
    index = (cumulative <= level).sum(-1, keepdim=True).minimum(is_kept.sum(-1, keepdim=True) - 1)
    return id_BN.gather(-1, index).squeeze(-1)


def _chat_parts(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids before a first user's turn, and from its end to the start of the answer."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}])
    before, mark, after = text.partition(_MARK)
    if not mark or not after:
        raise ConfigError("self_tokens: the chat template does not show the user's turn as text")
    head = tokenizer.encode_part(before)
    if tokenizer.adds_bos and head[:1] != [tokenizer.bos_token_id]:
        assert tokenizer.bos_token_id is not None
        head = [tokenizer.bos_token_id, *head]
    return head, tokenizer.encode_part(after)


def _prompts(
    tokenizer: Tokenizer, config: TrainConfig, rng: np.random.Generator
) -> list[list[int]]:
    head, _ = _chat_parts(tokenizer)
    starters = [tokenizer.encode_part(text) for text in STARTERS]
    prompts: list[list[int]] = []
    for _row in range(config.self_batch):
        begins = rng.random() < config.self_starters
        prompts.append(head + (starters[int(rng.integers(len(starters)))] if begins else []))
    return prompts
