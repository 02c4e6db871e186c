"""The peer on a CPU: llama.cpp on the same weights, through llama-cpp-python (PyPI). Run by hand:

    pip install llama-cpp-python gguf numpy
    python tests/reference/peer_llama_cpp.py model.bin|model.gguf THREADS [q8_0] [short]

Writes the weights of a model.bin as GGUF beside it (bf16 matrices, or q8_0; f32 norms), once; a .gguf is read as it is.
Then it times a prompt of 512 tokens and decoding at positions 0, 100, 512 and 2048 (short: 0 and 100): medians, and the
least CPU seconds of a prompt and of a token, one line of JSON.
tests/bench/turns.sh runs it and `qwen3 --bench` in turns.
"""
import json
import math
import os
import statistics
import struct
import sys
import time

import gguf
import numpy
from llama_cpp import Llama

NAMES = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
         "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
         "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
         "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def gguf_name(name):
    name = name.removesuffix(".weight")
    if name.startswith("model.layers."):
        _, _, layer, part = name.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.weight"
    return {"model.embed_tokens": "token_embd.weight", "model.norm": "output_norm.weight", "lm_head": "output.weight"}[name]


def convert(model, out, q8):
    data = numpy.memmap(model, numpy.uint8, "r")
    length = struct.unpack("<Q", data[:8].tobytes())[0]
    header = json.loads(data[8:8 + length].tobytes())
    c = json.loads(header.pop("__metadata__")["config"])
    w = gguf.GGUFWriter(out, "qwen3")
    w.add_block_count(c["num_hidden_layers"])
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c["num_key_value_heads"])
    w.add_key_length(c["head_dim"])
    w.add_value_length(c["head_dim"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_rope_freq_base(c["rope_theta"])
    w.add_vocab_size(c["vocab_size"])
    w.add_tokenizer_model("no_vocab")
    for name, t in header.items():
        begin, end = (8 + length + x for x in t["data_offsets"])
        raw = data[begin:end].view(numpy.uint16).reshape(t["shape"])
        wide = (raw.astype(numpy.uint32) << 16).view(numpy.float32)
        if raw.ndim == 1:
            w.add_tensor(gguf_name(name), wide)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0 if q8 else gguf.GGMLQuantizationType.BF16
            w.add_tensor(gguf_name(name), gguf.quants.quantize(wide, kind), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def main():
    model, threads, q8 = sys.argv[1], int(sys.argv[2]), "q8_0" in sys.argv[3:]
    gguf_file = model if model.endswith(".gguf") else model + (".q8_0" if q8 else ".bf16") + ".gguf"
    if not os.path.exists(gguf_file):
        convert(model, gguf_file + ".part", q8)
        os.rename(gguf_file + ".part", gguf_file)
    llm = Llama(gguf_file, n_ctx=2560, n_batch=512, n_ubatch=512, n_threads=threads, n_threads_batch=threads, verbose=False)
    rng = numpy.random.default_rng(1)
    text = lambda n: [int(x) for x in rng.integers(0, 150000, n)]

    def timed(n):
        ids = text(n)
        start, cpu = time.perf_counter(), time.process_time()
        llm.eval(ids)
        if n in (1, 512):
            least[n] = min(least.get(n, math.inf), time.process_time() - cpu)
        return time.perf_counter() - start

    least = {}  # CPU seconds
    timed(512)  # pages in the weights
    out = {"threads": threads, "weights": os.path.basename(gguf_file)}
    prompts = []
    for _ in range(3):
        llm.reset()
        prompts.append(timed(512))
    out["prompt_512"] = 512 / statistics.median(prompts)
    llm.reset()
    for position in (0, 100) if "short" in sys.argv[3:] else (0, 100, 512, 2048):
        while llm.n_tokens < position:
            llm.eval(text(min(512, position - llm.n_tokens)))
        out[f"decode_{position}"] = 1 / statistics.median(timed(1) for _ in range(24))
    print(json.dumps({**out, "prompt_cpu_s": least[512], "token_cpu_s": least[1]}))


main()
