// The README's table of models and memory: how many bytes of a GPU's memory the programs plan, by the functions that plan
// them. What CUDA itself takes (its context, the kernels: about half a GB) comes on top.
//
//     g++ -std=c++17 -I. -fopenmp tests/reference/memory_plan.cpp build/g++/all.a -lcmark -o build/memory_plan && build/memory_plan
#include "model/upload.h"
#include "model/quantized.h"
#include "model/session.h"
#include "train/trainer.h"

constexpr double GB = 1e9;
constexpr size_t SCRATCH = (32 << 20) + (18 << 20); // of split products and of attention: Book II's, which g++ does not see

struct Size { const char* name; int C, L, H, K, F; bool tied; int E = 0, k = 0, M = 0; }; // as `--synthesize` has them
constexpr Size SIZES[] = {{"0.6B", 1024, 28, 16, 8, 3072, true},  {"1.7B", 2048, 28, 16, 8, 6144, true},
                          {"4B", 2560, 36, 32, 8, 9728, true},    {"8B", 4096, 36, 32, 8, 12288, false},
                          {"14B", 5120, 40, 40, 8, 17408, false}, {"32B", 5120, 64, 64, 8, 25600, false},
                          {"30B-A3B", 2048, 48, 32, 4, 6144, false, 128, 8, 768}};

static Config config_of(const Size& s) {
    Config c = {};
    c.C = s.C, c.L = s.L, c.H = s.H, c.K = s.K, c.D = 128, c.F = s.F;
    c.V = 151936, c.max_positions = 40960, c.tied = s.tied;
    c.E = s.E, c.k = s.k, c.M = s.M;
    return c;
}

// Weights on a GPU: in bf16, or packed with --packed (embedding and head INT8, INT4 in groups of 128 with zero points)
// and the scratch in which they are unpacked.
static size_t weights(const Config& c, Format format) {
    if (format == Format::PLAIN) return 2 * parameters(c);
    size_t bytes = 0;
    for (const ModelTensor& t : model_tensors(c)) {
        const size_t rows = (size_t)t.rows, in = (size_t)t.columns;
        const bool int4 = format == Format::INT4 && t.kind < MODULES;
        bytes += !in || t.kind == ROUTER ? 2 * t.size() : rows * (int4 ? in / 2 + in / 128 * 3 : in + in / 32 * 2);
    }
    return bytes + 2 * unpacked_numbers(c);
}

// Session's plan, for a conversation of up to `context` tokens.
static size_t chat(const Config& c, int context, Format format = Format::PLAIN) {
    Arena arena;
    KVCache<bf16> cache;
    Activations<bf16> activations;
    const int chunk = std::min(Session<bf16>::GPU_CHUNK, context), rows = Session<bf16>::ROWS;
    cache.plan(arena, c, (size_t)(context + PAGE - 1) / PAGE);
    activations.plan(arena, c, chunk, false);
    return weights(c, format) + arena.used + (size_t)context * c.D * 4 + (size_t)rows * (4 * c.V + 2 * c.C) + SCRATCH;
}

// Trainer's plan, for batches of `batch` rows that feed 512 tokens each; rank 0 trains all parameters. Of a mixture of
// experts attention has adapters (--targets q,k,v,o).
static size_t training(const Config& c, int batch, int rank, bool recompute, Format format = Format::PLAIN) {
    const size_t HD = (size_t)c.H * c.D, KD = (size_t)c.K * c.D, C = c.C, F = c.F, L = c.L, r = rank;
    // Every A, and every B with the zeros beside its blocks: (in, out, modules) of the products qkv, o, gate and up, down.
    const size_t products[4][3] = {{C, HD + 2 * KD, 3}, {HD, C, 1}, {C, 2 * F, 2}, {F, C, 1}};
    size_t count = 0, width = 0;
    size_t masks = 0; // of dropout
    for (int i = 0; i < (c.E ? 2 : 4); i++) {
        const auto& [in, out, modules] = products[i];
        count += L * modules * r * (in + out), width += L * modules * r;
        if (rank) masks += (recompute ? 1 : L) * DropoutMasks::size((int)modules, (int)in, (size_t)batch * 512) * 4;
    }
    if (!rank) count = parameters(c);
    Arena arena;
    Activations<bf16> a;
    Flow<bf16> d;
    KVCache<bf16> kv;
    const int N = batch * 512;
    a.plan_training(arena, c, N, recompute, false, true);
    d.plan(arena, c, N, rank, std::min(N, Trainer<bf16>::gpu_head_rows(!rank)), true);
    kv.plan(arena, c, (size_t)N / PAGE + batch, true);
    const size_t model = rank ? weights(c, format) : 0; // (without LoRA the parameters are in `count`)
    return model + count * (2 + 4 * 4) + 2 * N * width + masks + arena.used + SCRATCH;
}

static void packed_table() {
    printf("GB     weights bf16   INT8   INT4   chat 4,096 INT8   INT4   QLoRA 16, rank 16, --recompute INT8   INT4\n");
    for (const Size& s : SIZES) {
        const Config c = config_of(s);
        printf("%-4s %14.2f", s.name, weights(c, Format::PLAIN) / GB);
        for (Format f : {Format::INT8, Format::INT4}) printf(" %6.2f", weights(c, f) / GB);
        for (Format f : {Format::INT8, Format::INT4}) printf(" %10.1f", chat(c, 4096, f) / GB);
        for (Format f : {Format::INT8, Format::INT4})
            printf(" %16.1f", training(c, 16, 16, true, f) / GB);
        printf("\n");
    }
}

// The README's: GB, and the smallest of a few cards that has half a GB more.
static void readme_table() {
    const auto cell = [](size_t bytes) {
        for (int card : {8, 16, 24, 32, 80})
            if (bytes / GB + 0.5 <= card) return format(" %.1f (%d) |", bytes / GB, card);
        return std::string(" none |");
    };
    for (const Size& s : SIZES) {
        const Config c = config_of(s);
        std::string row = format("| %s |", s.name);
        for (Format f : {Format::PLAIN, Format::INT8, Format::INT4}) row += cell(chat(c, 4096, f));
        row += cell(training(c, 16, 32, false));
        for (Format f : {Format::PLAIN, Format::INT4}) row += cell(training(c, 1, 32, true, f));
        puts((row + (c.E ? " CPU |" : cell(training(c, 1, 0, true)))).c_str());
    }
}

int main() {
    printf("GB         chat 4,096   chat 40,960   LoRA 16   LoRA 1, --recompute   full 16   full 1, --recompute\n");
    for (const Size& s : SIZES) {
        const Config c = config_of(s);
        if (c.E) {
            printf("%-4s %13.1f %13.1f %9.1f %21.1f\n", s.name, chat(c, 4096) / GB, chat(c, 40960) / GB,
                   training(c, 16, 32, false) / GB, training(c, 1, 32, true) / GB);
            continue;
        }
        printf("%-4s %16.1f %13.1f %9.1f %21.1f %9.1f %21.1f\n", s.name, chat(c, 4096) / GB, chat(c, 40960) / GB,
               training(c, 16, 32, false) / GB, training(c, 1, 32, true) / GB, training(c, 16, 0, false) / GB,
               training(c, 1, 0, true) / GB);
        if (s.C == 1024) // against what the program said on an H100: 9.41, 33.8 (without the model's 1.19) and 43.6
            fprintf(stderr, "0.6B: LoRA 16 rows %.2f, 64 rows %.1f, without the model; --full, 64 rows %.1f\n",
                    (training(c, 16, 32, false) - 2 * parameters(c)) / GB,
                    (training(c, 64, 32, false) - 2 * parameters(c)) / GB, training(c, 64, 0, false) / GB);
    }
    packed_table();
    readme_table();
}
