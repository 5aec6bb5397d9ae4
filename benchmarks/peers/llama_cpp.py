"""Measures batch-1 decoding by llama.cpp: its shared libraries, on random weights of a shape.

    python benchmarks/peers/llama_cpp.py --libraries build/bin --shape qwen3-30b-a3b \
        --weights q4_0 --kv-cache f16,q4_0 --context-len 1024,32768 --folder /dev/shm \
        --version "0.5.0" --json benchmarks/results/h200-peers.json

Writes a GGUF file of the shape (`subten.bench.shapes`) into the folder and removes it at the end.
Its blocks are random: one stretch of random bytes with small random scales, laid end to end from
changing offsets. The libraries are called as their header describes for version 0.5.0
(`llama_library.py`): a context is filled by llama.cpp's own prefill of random tokens, then a step
is one `llama_decode` of one token with flash attention, until its logits are on the host. Nothing
samples: the next token is random, as in llama.cpp's own llama-bench. A first step does not count.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from llama_library import Library

from subten.bench.records import add_records, origin
from subten.bench.shapes import SHAPES
from subten.config import ModelConfig
from subten.device import detect
from subten.engine.roof import measure_roof
from subten.engine.stats import Percentiles

RANDOM_BYTES = 2**26
"""Length of the random stretch that tensors are cut from."""

KV_BITS = {"bf16": 16.0, "f16": 16.0, "q8_0": 8.5, "q4_0": 4.5}

ARCHITECTURES = {"MixtralForCausalLM": "llama", "Qwen3MoeForCausalLM": "qwen3moe"}
"""Architecture of a shape to what llama.cpp calls it."""


def main(arguments: list[str] | None = None) -> None:
    """Measure every weight format with every cache and context."""
    args = parse(arguments)
    device = detect(args.device)
    roof = measure_roof(device.torch_device)
    config = SHAPES[args.shape]
    library = Library(args.libraries)
    for weights in args.weights.split(","):
        with tempfile.NamedTemporaryFile(dir=args.folder, suffix=".gguf") as file:
            read_bytes = write_model(Path(file.name), config, weights)
            model = library.load(Path(file.name))
            for kv_cache in args.kv_cache.split(","):
                for context in (int(text) for text in args.context_len.split(",")):
                    samples_ms = model.decode_times_ms(
                        context_len=context,
                        num_steps=args.num_steps,
                        kv_type=int(gguf.GGMLQuantizationType[kv_cache.upper()]),
                        vocab_size=config.vocab_size,
                        threads=args.threads,
                    )
                    tpot = Percentiles.of(samples_ms)
                    assert tpot is not None
                    num_bytes = read_bytes + (context + args.num_steps / 2) * kv_bytes(
                        config, KV_BITS[kv_cache]
                    )
                    floor_ms = num_bytes / roof.bytes_per_s * 1e3
                    record = {
                        "kind": "peer_latency",
                        "engine": "llama.cpp",
                        "version": args.version,
                        "shape": args.shape,
                        "weights_dtype": weights,
                        "kv_cache_dtype": kv_cache,
                        "batch_size": 1,
                        "context_len": context,
                        "tpot_ms_p50": tpot.p50,
                        "tpot_ms_p99": tpot.p99,
                        "tpot_num_samples": tpot.num_samples,
                        "bytes_per_step": num_bytes,
                        "roof_tb_s": roof.tb_s,
                        "floor_ms": floor_ms,
                        "roof_fraction": floor_ms / tpot.p50,
                        "settings": "llama_decode of a token, flash attention, logits on the host",
                        **origin(device),
                        "command": shlex.join(["python", *(arguments or sys.argv)]),
                    }
                    print(f"{args.shape}, {weights}, {kv_cache} cache, context {context}:", end=" ")
                    print(f"{tpot.p50:.3f} ms a token, p99 {tpot.p99:.3f}", flush=True)
                    if args.json is not None:
                        add_records(args.json, [record])
            model.close()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--libraries", type=Path, required=True, help="folder of the built ones")
    names = [name for name, shape in SHAPES.items() if shape.architecture in ARCHITECTURES]
    parser.add_argument("--shape", required=True, choices=names)
    parser.add_argument("--weights", default="q4_0", help="q4_0, q8_0, bf16 or f16, by commas")
    parser.add_argument("--kv-cache", default="f16,q4_0", help=f"by commas: {', '.join(KV_BITS)}")
    parser.add_argument("--context-len", default="1024", help="tokens in the cache, by commas")
    parser.add_argument("--num-steps", type=int, default=256, help="decode steps that count")
    parser.add_argument("--threads", type=int, default=4, help="of the host")
    parser.add_argument("--folder", type=Path, default=Path(), help="where the GGUF file may lie")
    parser.add_argument("--version", required=True, help="of llama.cpp, for the records")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="list of records to add to")
    return parser.parse_args(arguments)


def kv_bytes(config: ModelConfig, bits: float) -> float:
    """Bytes of the keys and values of one token."""
    return config.num_layers * config.num_kv_heads * config.head_dim * 2 * bits / 8


def tensors(config: ModelConfig, weights: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, shape (rows first) and type of each tensor of the file."""
    d_model, num_experts = config.d_model, config.num_experts
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "token_embd.weight", (config.vocab_size, d_model), weights
    yield "output_norm.weight", (d_model,), "f32"
    yield "output.weight", (config.vocab_size, d_model), weights
    for i in range(config.num_layers):
        yield f"blk.{i}.attn_norm.weight", (d_model,), "f32"
        yield f"blk.{i}.attn_q.weight", (query, d_model), weights
        yield f"blk.{i}.attn_k.weight", (kv, d_model), weights
        yield f"blk.{i}.attn_v.weight", (kv, d_model), weights
        yield f"blk.{i}.attn_output.weight", (d_model, query), weights
        if config.has_qk_norm:
            yield f"blk.{i}.attn_q_norm.weight", (config.head_dim,), "f32"
            yield f"blk.{i}.attn_k_norm.weight", (config.head_dim,), "f32"
        yield f"blk.{i}.ffn_norm.weight", (d_model,), "f32"
        yield f"blk.{i}.ffn_gate_inp.weight", (num_experts, d_model), "f32"
        yield f"blk.{i}.ffn_gate_exps.weight", (num_experts, config.d_ffn, d_model), weights
        yield f"blk.{i}.ffn_up_exps.weight", (num_experts, config.d_ffn, d_model), weights
        yield f"blk.{i}.ffn_down_exps.weight", (num_experts, d_model, config.d_ffn), weights


def write_model(path: Path, config: ModelConfig, weights: str) -> float:
    """A GGUF file with random weights; the bytes of it that a token reads."""
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config.architecture])
    writer.add_block_count(config.num_layers)
    writer.add_context_length(max(config.max_model_len, 2**17 + 2**9))
    writer.add_embedding_length(config.d_model)
    writer.add_feed_forward_length(config.d_ffn)
    writer.add_expert_feed_forward_length(config.d_ffn)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.top_k)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    kinds = {name: gguf.GGMLQuantizationType[name.upper()] for name in ("f32", weights)}
    random = {name: random_blocks(kind) for name, kind in kinds.items()}
    read_bytes = 0.0
    sizes = []
    for name, shape, kind_name in tensors(config, weights):
        kind = kinds[kind_name]
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        num_bytes = int(np.prod(shape)) // block * block_bytes
        # A shape in elements: only arrays of bytes are converted.
        writer.add_tensor_info(name, shape, np.dtype(np.float32), num_bytes, kind)
        sizes.append((kind_name, num_bytes))
        if name.startswith("token_embd"):
            read_bytes += num_bytes / shape[0]
        else:
            read_bytes += num_bytes * (config.top_k / config.num_experts if "_exps" in name else 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    longest = {kind: max(size for name, size in sizes if name == kind) for kind in kinds}
    repeated = {
        kind: np.resize(blocks.reshape(-1), blocks.size + longest[kind])
        for kind, blocks in random.items()
    }
    for i, (kind_name, num_bytes) in enumerate(sizes):
        blocks = random[kind_name]
        start = i * 7919 * blocks.shape[1] % blocks.size
        writer.write_tensor_data(repeated[kind_name][start : start + num_bytes])
    writer.close()
    return read_bytes


def random_blocks(kind: gguf.GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """RANDOM_BYTES of blocks of a type, uint8 [blocks, bytes of a block]."""
    rng = np.random.default_rng()
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    count = RANDOM_BYTES // block_bytes
    if kind == gguf.GGMLQuantizationType.F32:
        return rng.normal(0, 0.02, count).astype(np.float32).view(np.uint8).reshape(-1, 4)
    if kind == gguf.GGMLQuantizationType.F16:
        return rng.normal(0, 0.02, count).astype(np.float16).view(np.uint8).reshape(-1, 2)
    if kind == gguf.GGMLQuantizationType.BF16:
        high = rng.normal(0, 0.02, count).astype(np.float32).view(np.uint32) >> 16
        return high.astype(np.uint16).view(np.uint8).reshape(-1, 2)
    blocks = rng.integers(0, 256, (count, block_bytes), dtype=np.uint8)
    # Q4_0 and Q8_0 begin with their scale; codes are about 8 and 127 at most.
    largest = 8 if kind == gguf.GGMLQuantizationType.Q4_0 else 127
    scale = (rng.normal(0, 0.04, count) / largest).astype(np.float16)
    blocks[:, :2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks


if __name__ == "__main__":
    main()
