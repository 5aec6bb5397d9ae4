"""What a trained MoE is worth: perplexity beside the dense model's, balance, expert difference."""

# Letters: B rows, S positions, L layers, E experts, V vocabulary

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subten.tokenizer import Tokenizer
from subten.train.balance import max_violation
from subten.train.data import Array, windows
from subten.train.dense import DenseModel, dense_forward, make_dense_layer
from subten.train.model import Deltas, make_student_layer, student_forward

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "How many days are there in a week?",
    "Write one sentence about the sea.",
    "What does a doctor do?",
    "Name three colours.",
    "Explain what a computer is to a child.",
    "What is 2 + 2?",
)

StateFn = Callable[[Tensor], Tensor]
_CHUNK = 2048


def dense_state(model: DenseModel) -> StateFn:
    """The function from token ids (B S) to the dense model's final state (B S D)."""
    layer_fn = make_dense_layer(model.shape)
    return lambda id_BS: dense_forward(model, id_BS, layer_fn)


def student_state(
    model: DenseModel, deltas: Deltas, top_k: int, *, reroute: str = "none"
) -> StateFn:
    """The function from token ids (B S) to the student's final state (B S D)."""
    layer_fn = make_student_layer(model.shape, top_k, reroute)
    return lambda id_BS: student_forward(model, deltas, id_BS, layer_fn)[0]


def logits(model: DenseModel, state_TD: Tensor) -> Tensor:
    """Logits (T V) in float32."""
    return state_TD.float() @ model.head_VD.float().T


@torch.no_grad()
def perplexity(
    model: DenseModel, state_fn: StateFn, ids: Array, *, seq_len: int, rows: int
) -> dict[str, float]:
    """Perplexity over windows of `seq_len` side by side; each token but the first counts once."""
    total, count = 0.0, 0
    for window in windows(ids, seq_len, rows):
        id_BS = torch.from_numpy(window).to(model.device)
        state_TD = state_fn(id_BS[:, :-1]).flatten(0, 1)
        target_T = id_BS[:, 1:].flatten()
        for start in range(0, len(target_T), _CHUNK):
            part = slice(start, start + _CHUNK)
            total += float(
                F.cross_entropy(logits(model, state_TD[part]), target_T[part], reduction="sum")
            )
        count += len(target_T)
    assert count > 0, "no tokens to evaluate"
    return {"perplexity": math.exp(total / count), "nll": total / count, "tokens": count}


@torch.no_grad()
def expert_load(
    model: DenseModel, deltas: Deltas, ids: Array, *, top_k: int, seq_len: int, rows: int
) -> Tensor:
    """Tokens that each expert of each layer got (L E) on a text."""
    layer_fn = make_student_layer(model.shape, top_k)
    total = torch.zeros(deltas.router.shape[:2], device=model.device)
    for window in windows(ids, seq_len, rows):
        id_BS = torch.from_numpy(window[:, :-1]).to(model.device)
        total += student_forward(model, deltas, id_BS, layer_fn)[1].count_E
    return total.cpu()


def balance_report(count_LE: Tensor) -> dict[str, Any]:
    """MaxVio per layer, and its mean and largest."""
    per_layer = [round(v, 4) for v in max_violation(count_LE).tolist()]
    return {
        "max_vio_per_layer": per_layer,
        "max_vio_mean": sum(per_layer) / len(per_layer),
        "max_vio_max": max(per_layer),
    }


@torch.no_grad()
def expert_difference(
    model: DenseModel, deltas: Deltas, ids: Array, *, top_k: int, seq_len: int, rows: int
) -> dict[str, Any]:
    """How much the output changes when other experts compute, the router's choice untouched.

    `others`: in every layer the experts ranked K+1 to 2K compute for a token in place of the first
    K, with the first K's weights. `permute`: in every layer expert e+1 computes for expert e. For
    both: share of tokens whose likeliest next token changes, mean KL(original || changed) in nats,
    and perplexity.
    """
    changes = ["permute"] + (["others"] if 2 * top_k <= deltas.num_experts else [])
    original = student_state(model, deltas, top_k)
    sums = {name: [0.0, 0.0, 0.0] for name in changes}
    count = 0
    for window in windows(ids, seq_len, rows):
        id_BS = torch.from_numpy(window).to(model.device)
        target_T = id_BS[:, 1:].flatten()
        base_TD = original(id_BS[:, :-1]).flatten(0, 1)
        count += len(target_T)
        for name in changes:
            state_fn = student_state(model, deltas, top_k, reroute=name)
            other_TD = state_fn(id_BS[:, :-1]).flatten(0, 1)
            for start in range(0, len(target_T), _CHUNK):
                part = slice(start, start + _CHUNK)
                base = logits(model, base_TD[part]).log_softmax(-1)
                other = logits(model, other_TD[part]).log_softmax(-1)
                sums[name][0] += float((base.argmax(-1) != other.argmax(-1)).sum())
                sums[name][1] += float((base.exp() * (base - other)).sum())
                sums[name][2] -= float(other.gather(-1, target_T[part, None]).sum())
    report: dict[str, Any] = {"tokens": count}
    for name, (changed, divergence, nll) in sums.items():
        report[name] = {
            "share_argmax_changed": changed / count,
            "mean_kl": divergence / count,
            "perplexity": math.exp(nll / count),
        }
    return report


@torch.no_grad()
def greedy_answers(
    model: DenseModel, state_fn: StateFn, tokenizer: Tokenizer, *, max_tokens: int = 48
) -> dict[str, str]:
    """The likeliest answers to QUESTIONS, in the chat format; without one, as plain text."""
    prompts = [_prompt(tokenizer, question) for question in QUESTIONS]
    length = max(len(ids) for ids in prompts) + max_tokens
    id_BS = torch.zeros((len(prompts), length), dtype=torch.long, device=model.device)
    for row, ids in enumerate(prompts):
        id_BS[row, : len(ids)] = torch.tensor(ids)
    end_B = torch.tensor([len(ids) for ids in prompts], device=model.device)
    row_B = torch.arange(len(prompts), device=model.device)
    for _ in range(max_tokens):
        # Rows end at different places; what stands right of a row's end cannot be seen from it.
        stop = int(end_B.max())
        state_BSD = state_fn(id_BS[:, :stop])
        id_BS[row_B, end_B] = logits(model, state_BSD[row_B, end_B - 1]).argmax(-1)
        end_B += 1
    answers: dict[str, str] = {}
    for row, (question, prompt) in enumerate(zip(QUESTIONS, prompts, strict=True)):
        new = id_BS[row, len(prompt) : len(prompt) + max_tokens].tolist()
        for place, token_id in enumerate(new):
            if token_id in tokenizer.eos_token_ids:
                new = new[:place]
                break
        answers[question] = tokenizer.decode(new).strip()
    return answers


def _prompt(tokenizer: Tokenizer, question: str) -> list[int]:
    if tokenizer.chat_template is None:
        return tokenizer.encode(question)
    return tokenizer.encode_chat([{"role": "user", "content": question}])
