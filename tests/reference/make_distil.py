#!/usr/bin/env python3
"""Reference values for distillation, from TRL's GKDTrainer and PyTorch's autograd (run from the repo root; needs torch,
transformers, peft and trl). The result is committed; tests/fixtures/README.md describes every file.

    python tests/reference/make_distil.py

ops    rows of random logits of a student and a teacher: GKDTrainer's divergence for several beta and temperatures, mixed
       with the cross entropy of a target by several weights, and the gradient by the student's logits, in float64
batch  the loss of GKDTrainer for train/tied as the student and train/untied as the teacher on given answers to prompts of
       random tokens, padded, and its gradients; with a weight below 1 and a temperature the same by PyTorch. In float32.
outcomes  the same losses where the teacher gives the log-probabilities of some ids only, and all others are one outcome; by
       PyTorch, in float64
"""
import math
import os
from types import SimpleNamespace

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from trl.experimental.gkd import GKDTrainer

import make_fixtures as fixtures

ROOT = fixtures.ROOT + "/distil"
CASES = [(0.0, 1.0, 1.0), (1.0, 1.0, 1.0), (0.3, 1.0, 1.0), (0.0, 2.0, 0.6), (1.0, 0.7, 0.25), (0.5, 1.5, 0.9), (0.5, 1.0, 0.0)]
R, V = 3, 37
LENGTHS = [(5, 7), (2, 11), (9, 1), (1, 6)]  # of prompt, answer
SOME = ["model.norm.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"]
names = lambda case: dict(zip(("beta", "temperature", "weight"), case))


def make_ops():
    torch.manual_seed(3)
    student, teacher = ((2 * torch.randn(R, V)).double() for _ in range(2))
    target, scale = torch.tensor([3, 0, 36]), 0.3
    golden = {"student": student.flatten().tolist(), "teacher": teacher.flatten().tolist(), "target": target.tolist(), "scale": scale, "cases": []}
    for case in CASES:
        beta, temperature, weight = case
        x = student.clone().requires_grad_()
        divergence = GKDTrainer.generalized_jsd_loss(x, teacher, beta=beta, temperature=temperature, reduction="none").sum(-1)
        loss = weight * divergence + (1 - weight) * F.cross_entropy(x, target, reduction="none")
        (scale * loss.sum()).backward()
        golden["cases"].append({**names(case), "divergence": divergence.tolist(), "loss": loss.tolist(), "gradient": x.grad.flatten().tolist()})
    fixtures.write_golden(ROOT + "/ops.json", golden)


def make_outcomes():
    torch.manual_seed(5)
    J, scale = 8, 0.3
    student, teacher = (2 * torch.randn(R, V)).double(), (2 * torch.randn(R, V)).double()
    ids = [torch.randperm(V)[:n].tolist() for n in (7, 4, 1)]  # the token itself first
    log_p = [F.log_softmax(t, -1)[i] for t, i in zip(teacher, ids)]
    log_p[2] = torch.zeros(1).double()  # a token that is certain
    tails = [math.log(max(1 - p.exp().sum().item(), 1e-7)) for p in log_p]
    golden = {"J": J, "V": V, "student": student.flatten().tolist(), "ids": ids, "log_p": [p.tolist() for p in log_p], "scale": scale, "cases": []}
    for case in CASES:
        beta, temperature, weight = case
        x = student.clone().requires_grad_()
        losses, divergences = [], []
        for row, some, p, tail in zip(x, ids, log_p, tails):
            log_q = F.log_softmax(row, -1)
            rest = torch.ones(V, dtype=torch.bool)
            rest[some] = False
            q = F.log_softmax(torch.cat([log_q[some], log_q[rest].logsumexp(0, keepdim=True)]) / temperature, -1)
            p = F.log_softmax(torch.cat([p, torch.tensor([tail]).double()]) / temperature, -1)
            kl = lambda a, b: (a.exp() * (a - b)).sum()
            if beta in (0, 1):
                d = kl(p, q) if beta == 0 else kl(q, p)
            else:
                m = torch.stack([p + math.log(beta), q + math.log(1 - beta)]).logsumexp(0)
                d = beta * kl(p, m) + (1 - beta) * kl(q, m)
            divergences.append(d)
            losses.append(weight * d - (1 - weight) * log_q[some[0]])
        (scale * sum(losses)).backward()
        golden["cases"].append({**names(case), "divergence": [d.item() for d in divergences], "loss": [l.item() for l in losses], "gradient": x.grad.flatten().tolist()})
    fixtures.write_golden(ROOT + "/outcomes.json", golden)


def make_batch():
    g = torch.Generator().manual_seed(7)
    draw = lambda n: torch.randint(0, 95, (n,), generator=g).tolist()
    rows = [(draw(prompt), draw(answer)) for prompt, answer in LENGTHS]
    longest = max(len(p) + len(a) for p, a in rows)
    pad = lambda row, with_: row + [with_] * (longest - len(row))
    inputs = {"input_ids": torch.tensor([pad(p + a, 0) for p, a in rows]), "attention_mask": torch.tensor([pad([1] * len(p + a), 0) for p, a in rows]),
              "labels": torch.tensor([pad([-100] * len(p) + a, -100) for p, a in rows])}
    student, teacher = (fixtures.load(f"{fixtures.ROOT}/train/{name}", torch.float32, "eager") for name in ("tied", "untied"))
    golden, tensors = {"prompts": [p for p, _ in rows], "answers": [a for _, a in rows], "cases": []}, {}
    for i, case in enumerate(CASES):
        beta, temperature, weight = case
        student.zero_grad()
        if temperature == weight == 1:
            t = GKDTrainer.__new__(GKDTrainer)
            t.beta, t.teacher_model, t.accelerator = beta, teacher, SimpleNamespace()
            loss = t.compute_loss(student, inputs)
        else:
            run = lambda model: model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
            labels = inputs["labels"][:, 1:]
            logits = run(student)
            with torch.no_grad():
                theirs = run(teacher)
            loss = weight * GKDTrainer.generalized_jsd_loss(logits, theirs, labels, beta, temperature)
            loss = loss + (1 - weight) * F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
        golden["cases"].append({**names(case), "loss": loss.item()})
        tensors |= {f"{i}.{n}": p.grad.clone() for n, p in student.named_parameters() if n in SOME}
        print(names(case), loss.item())
    save_file(tensors, ROOT + "/gradients.safetensors", {"format": "pt"})
    fixtures.write_golden(ROOT + "/batch.json", golden)


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.makedirs(ROOT, exist_ok=True)
    make_ops()
    make_outcomes()
    make_batch()
