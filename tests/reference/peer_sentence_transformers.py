"""The peer of `qwen3 --embed` on a CPU: sentence-transformers with the same weights and texts. Run by hand:

    pip install sentence-transformers
    python export.py --to-hf m.bin m --tokenizer-from FOLDER      (a Hugging Face folder with tokenizer.json)
    rm m/chat_template.jinja                                      (sentence-transformers 6 would put the texts into it)
    python tests/reference/peer_sentence_transformers.py m texts.txt THREADS [float32] [batch size, default 32]

A text a line; last token's vector, normalised, <|endoftext|> behind each text, as Qwen3-Embedding has it. Prints the texts a second, the CPU's
seconds (which say more where other programs run too), and the first vector's first numbers, to be compared.
"""
import sys
import time

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Normalize, Pooling, Transformer

folder, file, threads = sys.argv[1:4]
dtype = torch.float32 if "float32" in sys.argv[4:] else torch.bfloat16
sizes = [int(a) for a in sys.argv[4:] if a.isdigit()]
torch.set_num_threads(int(threads))
texts = [line + "<|endoftext|>" for line in open(file, encoding="utf-8").read().splitlines()]
body = Transformer(folder, model_kwargs={"dtype": dtype}, processor_kwargs={"padding_side": "left"})
model = SentenceTransformer(modules=[body, Pooling(body.get_word_embedding_dimension(), "lasttoken"), Normalize()], device="cpu")
tokens = sum(len(body.tokenizer(t)["input_ids"]) for t in texts)
model.encode(texts[:4])  # the first pass finds its kernels
start, busy = time.time(), time.process_time()
vectors = model.encode(texts, batch_size=sizes[0] if sizes else 32, convert_to_tensor=True).float()
spent, busy = time.time() - start, time.process_time() - busy
print(f"{len(texts)} texts, {tokens} tokens in {spent:.2f} s ({busy:.2f} s of CPU): {len(texts) / spent:.2f} texts/s, {tokens / spent:.0f} tok/s, {dtype}",
      vectors[0][:4].tolist())
