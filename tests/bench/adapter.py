# A random LoRA adapter for a model.bin, on all its modules, so that the speed of adapters can be measured without one:
#     python3 tests/bench/adapter.py m.bin build/adapter 16
import array, json, os, random, struct, sys

model, folder, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
with open(model, "rb") as file:
    length, = struct.unpack("<Q", file.read(8))
    shapes = {name: t["shape"] for name, t in json.loads(file.read(length)).items() if "_proj.weight" in name}
os.makedirs(folder, exist_ok=True)
header, data, draw = {}, [], random.Random(0)
some = array.array("f", (draw.uniform(-0.01, 0.01) for _ in range(1 << 16)))
at = 0
for name, (rows, columns) in shapes.items():
    for matrix, shape in (("A", [rank, columns]), ("B", [rows, rank])):
        n = shape[0] * shape[1]
        key = "base_model.model." + name.replace(".weight", ".lora_%s.weight" % matrix)
        header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + 4 * n]}
        data.append((some * (n // len(some) + 1))[:n])
        at += 4 * n
text = json.dumps(header).encode()
with open(folder + "/adapter_model.safetensors", "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text)
    for numbers in data:
        numbers.tofile(file)
with open(folder + "/adapter_config.json", "w") as file:
    json.dump({"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none",
               "target_modules": sorted({name.split(".")[-2] for name in shapes})}, file)
