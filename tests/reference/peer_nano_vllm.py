"""nano-vllm beside serve, for docs/performance.md: a line of JSON a pass. Random weights of the 0.6B in bf16. By hand,
where torch, transformers and xxhash are, with a clone of github.com/GeeeekExplorer/nano-vllm:

    PYTHONPATH=nano-vllm python tests/reference/peer_nano_vllm.py nano exam        (or one of them)

nano: the requests of its own bench.py, which are serve's with `bench_serve --preset nano`. exam: 193 prompts of 60
tokens, 384 tokens each. Three passes each; the first compiles. Attention is flash-attn's, which nano-vllm imports.
Without that package it is, with the same pages: of prompts PyTorch's FlashAttention 2, of single tokens FlashInfer's
XQA kernel, which is compiled at its first use.
"""
import json
import random
import sys
import tempfile
import time
import types

import torch
import transformers
from transformers import Qwen3Config

CONFIG = Qwen3Config(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                     num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960,
                     rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=True, dtype="bfloat16")


def stand_in():
    """The two functions of flash-attn that nano-vllm calls."""
    import flashinfer
    from flashinfer.decode import xqa_batch_decode_with_kv_cache
    room = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    page = 128  # of nano-vllm's pages XQA takes halves

    def varlen(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k, softmax_scale, causal, block_table):
        if block_table is not None:  # a prompt's later part: its pages one behind the other
            ends = cu_seqlens_k.tolist()
            parts = [[cache[table[:-(-(end - begin) // cache.size(1))].long()].flatten(0, 1)[:end - begin]
                      for table, begin, end in zip(block_table, ends, ends[1:])] for cache in (k, v)]
            k, v = torch.cat(parts[0]), torch.cat(parts[1])
        return torch.ops.aten._flash_attention_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, causal, False,
            scale=softmax_scale)[0]

    def with_cache(q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, causal):
        each = k_cache.size(1) // page
        halves = (block_table.unsqueeze(-1) * each + torch.arange(each, device="cuda", dtype=torch.int32)).flatten(1)
        pages = [cache.view(-1, page, *cache.shape[2:]) for cache in (k_cache, v_cache)]
        lengths = cache_seqlens.clamp_min(1).view(torch.uint32)  # (spare rows of a graph have none)
        return xqa_batch_decode_with_kv_cache(q.squeeze(1), tuple(pages), room, halves, lengths,
                                              halves.size(1) * page, bmm1_scale=softmax_scale)

    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func, module.flash_attn_with_kvcache = varlen, with_cache
    sys.modules["flash_attn"] = module
    return f"PyTorch's FlashAttention 2; FlashInfer {flashinfer.__version__}'s XQA"


def no_tokenizer(*_, **__):
    return types.SimpleNamespace(eos_token_id=151645, decode=lambda ids: "")


def random_weights(model, _):
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.02)
        else:
            weight.data.fill_(1)


def nano():
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    return prompts, [random.randint(100, 1024) for _ in prompts]


def exam():
    random.seed(0)
    return [[random.randint(0, 10000) for _ in range(60)] for _ in range(193)], [384] * 193


def main():
    tasks = {"nano": nano, "exam": exam}
    if not sys.argv[1:] or not set(sys.argv[1:]) <= set(tasks):
        sys.exit("peer_nano_vllm.py: tasks are nano, exam")
    torch.manual_seed(0)
    try:
        import flash_attn
        attention = f"flash-attn {flash_attn.__version__}"
    except ImportError:
        attention = stand_in()
    from nanovllm import LLM, SamplingParams
    from nanovllm.engine import llm_engine, model_runner
    llm_engine.AutoTokenizer = types.SimpleNamespace(from_pretrained=no_tokenizer)
    model_runner.load_model = random_weights
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
                      "transformers": transformers.__version__, "attention": attention}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        CONFIG.save_pretrained(folder)
        llm = LLM(folder, enforce_eager=False, max_model_len=4096)
    for task in sys.argv[1:]:
        for turn in range(3):
            prompts, lengths = tasks[task]()
            how = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length) for length in lengths]
            start = time.perf_counter()
            llm.generate(prompts, how, use_tqdm=False)
            print(json.dumps({"task": task, "pass": turn,
                              "tokens_per_second": round(sum(lengths) / (time.perf_counter() - start))}), flush=True)


main()
