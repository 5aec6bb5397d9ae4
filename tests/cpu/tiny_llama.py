"""A tiny random Llama for tests: as a GGUF file and as a transformers model of the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel

CHAT_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ROPE_THETA = 5000.0
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("t h", "th e", "i n", "\u0120 a", "\u010a \u010a")


@dataclass(frozen=True, kw_only=True)
class TinyShape:
    """Sizes of the model; the head dimension differs from width / heads on purpose."""

    layers: int = 2
    width: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    ffn: int = 48
    is_tied: bool = True


def vocabulary() -> list[str]:
    """Special tokens, the 256 bytes and a few merges."""
    merged = ["".join(merge.split(" ")) for merge in MERGES]
    return [*SPECIAL, *sorted(ByteLevel.alphabet()), *merged]


def hf_tensors(shape: TinyShape, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights by Hugging Face name, float32."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*size: int, scale: float | None = None) -> torch.Tensor:
        scale = size[-1] ** -0.5 if scale is None else scale
        return torch.randn(*size, generator=generator) * scale

    s = shape
    tensors = {"model.embed_tokens.weight": rand(len(vocabulary()), s.width, scale=0.5)}
    for i in range(s.layers):
        prefix = f"model.layers.{i}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": 1 + rand(s.width, scale=0.1),
            f"{prefix}.self_attn.q_proj.weight": rand(s.heads * s.head_dim, s.width, scale=0.4),
            f"{prefix}.self_attn.k_proj.weight": rand(s.kv_heads * s.head_dim, s.width, scale=0.4),
            f"{prefix}.self_attn.v_proj.weight": rand(s.kv_heads * s.head_dim, s.width),
            f"{prefix}.self_attn.o_proj.weight": rand(s.width, s.heads * s.head_dim),
            f"{prefix}.post_attention_layernorm.weight": 1 + rand(s.width, scale=0.1),
            f"{prefix}.mlp.gate_proj.weight": rand(s.ffn, s.width),
            f"{prefix}.mlp.up_proj.weight": rand(s.ffn, s.width),
            f"{prefix}.mlp.down_proj.weight": rand(s.width, s.ffn),
        }
    tensors["model.norm.weight"] = 1 + rand(s.width, scale=0.1)
    if not s.is_tied:
        tensors["lm_head.weight"] = rand(len(vocabulary()), s.width)
    return tensors


_TO_GGUF = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """GGUF name of a Hugging Face tensor."""
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{_TO_GGUF[part]}.weight"


def _permute(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Row order of GGUF Llama files, as its converter makes it from Hugging Face's."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, half, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    shape: TinyShape,
    tensors: dict[str, torch.Tensor],
    *,
    arch: str = "llama",
    drop: str = "",
    extra: str = "",
    add_bos: bool = False,
    chat_template: str | None = CHAT_TEMPLATE,
    quantize: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """Write the model with its tokenizer; `drop` and `extra` name a tensor to leave out or add."""
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_context_length(256)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_freq_base(ROPE_THETA)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = vocabulary()
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(add_bos)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for name, tensor in tensors.items():
        if name == drop:
            continue
        array = tensor.numpy()
        if name.endswith("q_proj.weight"):
            array = _permute(array, shape.heads)
        elif name.endswith("k_proj.weight"):
            array = _permute(array, shape.kv_heads)
        if quantize is not None and array.ndim == 2 and array.shape[-1] % 32 == 0:
            packed = gguf.quantize(array, quantize)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=quantize)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
    if extra:
        writer.add_tensor(extra, np.zeros((4,), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def hf_model(shape: TinyShape, tensors: dict[str, torch.Tensor]) -> Any:
    """The transformers library's own Llama with these weights, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=shape.width,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=len(vocabulary()),
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=shape.is_tied,
    )
    model = LlamaForCausalLM(config).float().eval()
    state = dict(tensors)
    if shape.is_tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


def dense_model(path: Path) -> Any:
    """The trainer's dense model of a file or folder, in float32 on the CPU."""
    from subten.train.dense import DenseModel
    from subten.weights.load import load_model

    settings = {"device": torch.device("cpu"), "dtype": "float32"}
    return DenseModel(load_model(str(path), **settings, backend="torch", kv_cache_dtype="bf16"))


def sample_text(num_documents: int, seed: int = 0) -> str:
    """Documents of a small made-up language that a tiny model can learn a little of."""
    rng = np.random.default_rng(seed)
    words = ("the", "cat", "sat", "in", "a", "hat", "then", "ran", "far")
    documents = []
    for _ in range(num_documents):
        paragraphs = [
            " ".join(words[int(i)] for i in rng.integers(len(words), size=30)) for _ in range(3)
        ]
        documents.append("\n\n".join(paragraphs) + "\n")
    return "<|endoftext|>\n".join(documents)
