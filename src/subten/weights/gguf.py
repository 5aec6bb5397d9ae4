"""Llama-type GGUF files as Hugging Face style config, tensors and tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor, dequantize

from subten.core import CheckpointError, reason
from subten.tokenizer import Tokenizer

_MAGIC = b"GGUF"
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFCheckpoint:
    """A Llama-type GGUF file: `config` (keys of LlamaForCausalLM), tensors by Hugging Face name.

    Tensors are dequantised one at a time, to float32, on each call; q and k rows come in the order
    that half-split rotary embedding (Hugging Face, GPT-NeoX) wants.
    """

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self.path = path
        self.fields: dict[str, Any] = {}
        for key, entry in reader.fields.items():
            self.fields[key] = entry.contents()
        self._by_gguf_name = {tensor.name: tensor for tensor in reader.tensors}
        self.config = self._read_config()
        self._shapes = self._expected_shapes()
        self._check_tensors()

    @property
    def names(self) -> tuple[str, ...]:
        """Hugging Face names of all tensors, in the order of the layers."""
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; rows are outputs."""
        return self._shapes[name][1]

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, dequantised to float32."""
        if name not in self._shapes:
            raise CheckpointError(f"{self.path.name}: no tensor {name!r}")
        gguf_name, shape = self._shapes[name]
        entry = self._by_gguf_name[gguf_name]
        try:
            values = dequantize(entry.data, entry.tensor_type)
        except (NotImplementedError, ValueError) as error:
            kind = entry.tensor_type.name
            raise CheckpointError(f"{self.path.name}: {gguf_name}: type {kind}: {error}") from error
        array = np.asarray(values, dtype=np.float32).reshape(shape)
        if name.endswith("q_proj.weight"):
            array = _unpermute(array, self.config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            array = _unpermute(array, self.config["num_key_value_heads"])
        if not array.flags.writeable or not array.flags.c_contiguous:
            array = array.copy()
        return torch.from_numpy(array)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors by Hugging Face name, one in memory at a time."""
        for name in self._shapes:
            yield name, self.tensor(name)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the file carries."""
        return Tokenizer.from_gguf(self.fields)

    def _field(self, key: str) -> Any:
        if key not in self.fields:
            raise CheckpointError(f"{self.path.name}: field {key!r} is missing")
        return self.fields[key]

    def _read_config(self) -> dict[str, Any]:
        architecture = self._field("general.architecture")
        if architecture != "llama":
            raise CheckpointError(
                f"{self.path.name}: general.architecture: got {architecture!r}; allowed: 'llama'"
            )
        if self.fields.get("llama.expert_count", 0):
            raise CheckpointError(
                f"{self.path.name}: llama.expert_count: only dense files are read"
            )
        scaling = self.fields.get("llama.rope.scaling.type", "none")
        if scaling != "none":
            raise CheckpointError(
                f"{self.path.name}: llama.rope.scaling.type: got {scaling!r}; allowed: 'none'"
            )
        hidden = int(self._field("llama.embedding_length"))
        num_heads = int(self._field("llama.attention.head_count"))
        head_dim = int(self.fields.get("llama.attention.key_length", hidden // num_heads))
        for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
            if int(self.fields.get(key, head_dim)) != head_dim:
                got = self.fields[key]
                raise CheckpointError(f"{self.path.name}: {key}: got {got}; allowed: {head_dim}")
        embedding = self._by_gguf_name.get("token_embd.weight")
        if embedding is None:
            raise CheckpointError(f"{self.path.name}: tensor 'token_embd.weight' is missing")
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": int(self._field("llama.feed_forward_length")),
            "num_hidden_layers": int(self._field("llama.block_count")),
            "num_attention_heads": num_heads,
            "num_key_value_heads": int(self.fields.get("llama.attention.head_count_kv", num_heads)),
            "head_dim": head_dim,
            "vocab_size": int(embedding.shape[1]),
            "max_position_embeddings": int(self._field("llama.context_length")),
            "rms_norm_eps": _shortest(self._field("llama.attention.layer_norm_rms_epsilon")),
            "rope_theta": _shortest(self.fields.get("llama.rope.freq_base", 10000.0)),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": "output.weight" not in self._by_gguf_name,
        }
        for name in ("bos", "eos"):
            token_id = self.fields.get(f"tokenizer.ggml.{name}_token_id")
            if token_id is not None:
                config[f"{name}_token_id"] = int(token_id)
        return config

    def _expected_shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Hugging Face name to GGUF name and shape, for every tensor that the config asks for."""
        config = self.config
        hidden, ffn = config["hidden_size"], config["intermediate_size"]
        q_rows = config["num_attention_heads"] * config["head_dim"]
        kv_rows = config["num_key_value_heads"] * config["head_dim"]
        layer_shapes: dict[str, tuple[int, ...]] = {
            "attn_norm": (hidden,),
            "attn_q": (q_rows, hidden),
            "attn_k": (kv_rows, hidden),
            "attn_v": (kv_rows, hidden),
            "attn_output": (hidden, q_rows),
            "ffn_norm": (hidden,),
            "ffn_gate": (ffn, hidden),
            "ffn_up": (ffn, hidden),
            "ffn_down": (hidden, ffn),
        }
        vocabulary = (config["vocab_size"], hidden)
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {
            "model.embed_tokens.weight": ("token_embd.weight", vocabulary)
        }
        for layer in range(config["num_hidden_layers"]):
            for part, shape in layer_shapes.items():
                name = f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
                shapes[name] = (f"blk.{layer}.{part}.weight", shape)
        shapes["model.norm.weight"] = ("output_norm.weight", (hidden,))
        if not config["tie_word_embeddings"]:
            shapes["lm_head.weight"] = ("output.weight", vocabulary)
        return shapes

    def _check_tensors(self) -> None:
        wanted = dict(self._shapes.values())
        missing = sorted(wanted.keys() - self._by_gguf_name.keys())
        unknown = sorted(self._by_gguf_name.keys() - wanted.keys())
        if missing:
            raise CheckpointError(f"{self.path.name}: missing tensors: {_listing(missing)}")
        if unknown:
            raise CheckpointError(f"{self.path.name}: unknown tensors: {_listing(unknown)}")
        for name, shape in wanted.items():
            got = _rows_first(self._by_gguf_name[name])
            if got != shape:
                raise CheckpointError(
                    f"{self.path.name}: {name}: shape {list(got)}; "
                    f"its config asks for {list(shape)}"
                )


def read_gguf(path: str | Path) -> GGUFCheckpoint:
    """Open a Llama-type GGUF file; nothing is dequantised yet.

    Raises CheckpointError, naming the file and what is wrong, for a missing, damaged or truncated
    file, another architecture, and missing, unknown or misshapen tensors.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        with path.open("rb") as stream:
            is_gguf = stream.read(len(_MAGIC)) == _MAGIC
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read ({reason(error)})") from error
    if not is_gguf:
        raise CheckpointError(f"{path.name}: no GGUF file, which would begin with GGUF")
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError, OSError) as error:
        # Whatever the reader says of its arrays, it was told a wrong length or number.
        raise CheckpointError(f"{path.name}: damaged or truncated GGUF file") from error
    return GGUFCheckpoint(path, reader)


def _unpermute(rows: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Undo the row order of GGUF Llama files, where RoPE turns neighbours (2i, 2i + 1)."""
    num_rows, width = rows.shape
    half = num_rows // num_heads // 2
    return rows.reshape(num_heads, half, 2, width).swapaxes(1, 2).reshape(num_rows, width)


def _rows_first(tensor: ReaderTensor) -> tuple[int, ...]:
    return tuple(int(n) for n in reversed(tensor.shape.tolist()))


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _listing(names: list[str], limit: int = 4) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
