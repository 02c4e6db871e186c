"""Peers of our speeds on a GPU, for docs/performance.md: a line of JSON a measurement. Random weights of the real
shapes in bf16. By hand, where torch and transformers (lora: peft) are:

    python tests/reference/peer_speed.py decode prompt lora moe        (or some of them)

decode: the 0.6B, greedy, batch 1, static cache, a compiled step as CUDA graphs. prompt: 2,048 tokens, compiled. lora:
rank 32 on all modules, 16 rows of 512 tokens, compiled, AdamW fused, no dropout (compiled with dropout it is slower).
moe: 30B-A3B with grouped products, a prompt of 2,048 and single tokens. The first calls, which compile, are not
counted.
"""
import gc
import json
import sys
import time

import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, StaticCache

COMMON = dict(vocab_size=151936, head_dim=128, max_position_embeddings=40960, rope_theta=1e6, rms_norm_eps=1e-6)
DENSE = Qwen3Config(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                    num_key_value_heads=8, tie_word_embeddings=True, **COMMON)
MOE = Qwen3MoeConfig(hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
                     num_key_value_heads=4, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
                     norm_topk_prob=True, tie_word_embeddings=False, **COMMON)


def say(task, **figures):
    print(json.dumps({"task": task, **figures}), flush=True)


def random_model(kind, config, **options):
    torch.manual_seed(0)
    with torch.device("cuda"):
        return kind._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa", **options)


def seconds(work, times, warm=2):
    """The median time of a call."""
    took = []
    for i in range(warm + times):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    return sorted(took[warm:])[times // 2]


@torch.inference_mode()
def decode(model, task, compiled=True, tokens=256):
    cache = StaticCache(config=model.config, max_cache_len=1024)

    def step(token, place):
        logits = model(input_ids=token, position_ids=place.view(1, 1), cache_position=place,
                       past_key_values=cache).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    token = torch.tensor([[5]], device="cuda")
    for i in range(8):  # (the cache takes its memory)
        token = step(token, torch.tensor([i], device="cuda"))
    run = torch.compile(step, mode="reduce-overhead", fullgraph=True) if compiled else step
    place = torch.tensor([8], device="cuda")
    for i in range(16 + tokens):
        if i == 16:
            torch.cuda.synchronize()
            start = time.perf_counter()
        torch.compiler.cudagraph_mark_step_begin()
        token = run(token, place).clone()
        place = place + 1
    torch.cuda.synchronize()
    say(task, compiled=compiled, tokens_per_second=round(tokens / (time.perf_counter() - start), 1))


@torch.inference_mode()
def prompt(model, task, compiled=True, length=2048):
    ids = torch.randint(0, 150000, (1, length), device="cuda")
    run = torch.compile(model) if compiled else model
    took = seconds(lambda: run(input_ids=ids, use_cache=False, logits_to_keep=1), 5)
    say(task, compiled=compiled, length=length, tokens_per_second=round(length / took))


def lora(batch=16, length=512):
    import peft
    torch.cuda.reset_peak_memory_stats()
    base = random_model(Qwen3ForCausalLM, DENSE).train()
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = peft.get_peft_model(base, peft.LoraConfig(r=32, lora_alpha=64, lora_dropout=0.0, target_modules=modules))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1.5e-4, weight_decay=0.01, fused=True)
    run = torch.compile(model)
    ids = torch.randint(0, 150000, (batch, length), device="cuda")

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    took = seconds(step, 10, 3)
    say("lora", peft=peft.__version__, batch=batch, length=length, tokens_per_second=round(batch * length / took),
        gigabytes=round(torch.cuda.max_memory_allocated() / 1e9, 1))


def moe():
    model = random_model(Qwen3MoeForCausalLM, MOE, experts_implementation="grouped_mm").eval()
    prompt(model, "moe prompt", compiled=False)
    decode(model, "moe decode", compiled=False, tokens=64)
    decode(model, "moe decode")


def main():
    tasks = sys.argv[1:]
    known = {"decode": lambda: decode(random_model(Qwen3ForCausalLM, DENSE).eval(), "decode"),
             "prompt": lambda: prompt(random_model(Qwen3ForCausalLM, DENSE).eval(), "prompt"), "lora": lora, "moe": moe}
    if not tasks or not set(tasks) <= set(known):
        sys.exit(f"peer_speed.py: tasks are {', '.join(known)}")
    say("machine", gpu=torch.cuda.get_device_name(), torch=torch.__version__, cuda=torch.version.cuda,
        transformers=transformers.__version__)
    failed = []
    for task in tasks:
        try:
            known[task]()
        except Exception as error:  # the others go on
            failed.append(task)
            say(task, error=" ".join(repr(error).split())[:500])
        gc.collect()
        torch.cuda.empty_cache()
        torch.compiler.reset()
    sys.exit(bool(failed))


main()
