// model/weights.cpp: weights of a checkpoint; see weights.h.
#include "model/weights.h"
#include "model/instances.h"
#include "model/quantize_matrix.h"

#ifndef QWEN3_DOUBLE
bf16 int8_scale(float largest) {
    bf16 s = to_bf16(largest / 127);
    while (127. * to_acc(s) < largest) s.bits++;
    while (s.bits && 127. * to_acc(bf16{(uint16_t)(s.bits - 1)}) >= largest) s.bits--;
    return s;
}

bf16 int8_scale(const float* w, size_t n) {
    float largest = 0;
    for (size_t i = 0; i < n; i++) largest = std::max(largest, std::fabs(w[i]));
    const bf16 first = int8_scale(largest);
    if (first.bits == 0) return first;
    typedef double Each __attribute__((vector_size(SCALES * sizeof(double))));
    Each s = {}, lost = {};
    for (int c = 0; c < SCALES; c++) s[c] = to_acc(bf16{(uint16_t)std::min(first.bits + c, 0x7f7f)});
    const Each inverse = 1. / s;
    for (size_t i = 0; i < n; i++) {
        const double x = w[i];
        const Each nearest = x * inverse + 6755399441055744. - 6755399441055744.; // adding 1.5 * 2^52 rounds
        const Each off = x - nearest * s;
        lost += off * off;
    }
    int best = 0;
    for (int c = 1; c < SCALES; c++)
        if (lost[c] < lost[best]) best = c;
    return {(uint16_t)std::min(first.bits + best, 0x7f7f)};
}

bool to_int8(int8_t* q,       // (rows, in) out
             bf16* scale,     // (rows, ceil(in / 32)) out
             const Tensor& t, // (rows, in)
             size_t rows, size_t in) {
    static_assert(Tile::COLUMNS % GROUP == 0);
    const size_t groups = (in + GROUP - 1) / GROUP;
    std::atomic<bool> finite = true;
    each_tile(t, 0, rows, [&](const Tile& tile, const float* numbers) {
        for (size_t r = 0; r < tile.rows; r++)
            for (size_t k = 0; k < tile.columns; k += GROUP) {
                const float* w = numbers + r * Tile::COLUMNS + k;
                const size_t n = std::min((size_t)GROUP, tile.columns - k), first = (tile.r + r) * in + tile.k + k;
                if (!std::all_of(w, w + n, [](float x) { return std::isfinite(x); })) finite = false;
                if (!finite) return;
                const bf16 chosen = scale[(tile.r + r) * groups + (tile.k + k) / GROUP] = int8_scale(w, n);
                const double s = to_acc(chosen);
                for (size_t i = 0; i < n; i++) q[first + i] = s > 0 ? (int8_t)std::nearbyint(w[i] / s) : (int8_t)0;
            }
    });
    return finite;
}
#endif

template <class T> struct WeightLoader {
    Weights<T>& w;
    const ModelFile& file;
    std::shared_ptr<Arena> last = nullptr; // of w.converted

    const Tensor& find(const std::string& name, const Shape& shape) {
        const auto found = file.tensors.find(name);
        if (found == file.tensors.end()) DIE("%s: no tensor %s", file.path.c_str(), name.c_str());
        need_shape(name, found->second, shape);
        return found->second;
    }

    // n new numbers, if there is memory for them. They belong to tensor t, and live as long as the weights: allocated
    // one after another in large pieces of memory, so that these can have huge pages.
    template <class U> U* own(size_t n, const Tensor& t, const std::string& name) {
        const size_t have = available_memory(), bytes = (n * sizeof(U) + 63) / 64 * 64, piece = 16 << 20;
        if (bytes > have)
            DIE("%s: converting tensor %s needs %zu bytes of memory and %zu are available", t.file.c_str(),
                name.c_str(), bytes, have);
        if (!last || last->size - last->used < bytes) {
            last = std::make_shared<Arena>();
            last->template take<uint8_t>(std::min(have, std::max(bytes, piece)));
            last->allocate("the model");
            w.converted.push_back(last);
        }
        return last->template take<U>(n);
    }

    // A tensor's numbers as T: where the file maps them, if they are T and aligned there.
    const T* numbers(const std::string& name, const Shape& shape) {
        const Tensor& t = find(name, shape);
        if (!t.is_float()) DIE("%s: tensor %s is not BF16, F16 or F32", t.file.c_str(), name.c_str());
        const bool same = (std::is_same_v<T, bf16> && t.dtype == Dtype::BF16) ||
                          (std::is_same_v<T, float> && t.dtype == Dtype::F32);
        return same && (uintptr_t)t.data % alignof(T) == 0 ? (const T*)t.data : converted(name, t);
    }
    const T* converted(const std::string& name, const Tensor& t) {
        T* out = own<T>(count_of(t.shape), t, name);
        if (!read_numbers(out, t) && t.is_quantized())
            DIE("%s: tensor %s has an infinity or a NaN", t.file.c_str(), name.c_str());
        return out;
    }

    // Makes the matrix (rows, in) block b of a Linear. made BLOCKS: the tensor is in blocks, and stays so.
    void load_block(Linear<T>& linear, int b, const ModelTensor& m, Format made, bool packed) {
        const std::string name = m.name();
        const int rows = linear.rows[b] = m.rows, in = linear.in = m.columns;
        const Tensor& t = find(name, m.shape());
        Kept kept = (packed || made == Format::FP8) && made != Format::INT8 && t.is_quantized() ? kept_as(t) : Kept{};
        const bool to_fp8 = made == Format::FP8 && m.kind < MODULES && kept.format != Format::FP8;
        if (to_fp8 || (kept.format == Format::BLOCKS && !packed)) kept = {};
        if (made == Format::BLOCKS) kept.format = made;
        const Format before = linear.format;
        linear.w[b] = nullptr, linear.q[b] = nullptr, linear.scale[b] = nullptr, linear.zero[b] = nullptr;
        linear.group = kept.group, linear.group_rows = kept.group_rows, linear.format = kept.format;
        if (t.dtype == Dtype::I8) {
            const Tensor& s = find(name + "_scale", {rows, (in + GROUP - 1) / GROUP});
            if (s.dtype != Dtype::BF16 || (uintptr_t)s.data % 2)
                DIE("%s: tensor %s_scale is not BF16 at an even address", s.file.c_str(), name.c_str());
            linear.q[b] = (const int8_t*)t.data, linear.scale[b] = s.data, linear.format = Format::INT8;
        } else if (to_fp8) {
            make_fp8(linear, b, name, t);
        } else if (kept.format == Format::INT8) {
            linear.q[b] = (const int8_t*)t.data, linear.scale[b] = t.packed->scales.data;
        } else if (kept.format == Format::BLOCKS) {
            linear.q[b] = (const int8_t*)t.data, linear.type[b] = t.dtype;
        } else if (kept.format == Format::INT4) {
            const size_t n = (size_t)rows * linear.groups() + 8; // (a vector reads past the last row's end)
            int8_t* q = own<int8_t>(rows * linear.row_bytes(), t, name);
            uint16_t* scale = own<uint16_t>(n, t, name);
            uint8_t* zero = kept.zeros ? own<uint8_t>(n, t, name) : nullptr;
            std::fill_n(scale + n - 8, 8, 0);
            read_pairs(q, scale, zero, t, kept);
            linear.q[b] = q, linear.scale[b] = scale, linear.zero[b] = zero;
        } else if (kept.format == Format::FP8) {
            float* scale = own<float>(count_of(t.packed->scales.shape), t, name);
            if (!read_numbers(scale, t.packed->scales)) DIE("%s: %s has bad scales", t.file.c_str(), name.c_str());
            linear.q[b] = (const int8_t*)t.data, linear.scale[b] = scale;
        } else if (made == Format::INT8 || (packed && t.is_quantized())) {
            make_int8(linear, b, name, t);
        } else {
            linear.w[b] = numbers(name, {rows, in});
        }
        if (b && before != linear.format && !file.is_quantized())
            DIE("%s: tensor %s is INT8 and its neighbours are not, or the other way round", t.file.c_str(),
                name.c_str());
        plain = (b && plain) || linear.format == Format::PLAIN;
        in_blocks = (!b || in_blocks) && kept.format != Format::PLAIN && !t.packed;
        mixed = b && (mixed || before != linear.format || kept.group != last_kept.group ||
                      kept.group_rows != last_kept.group_rows);
        last_kept = kept;
    }
    // The Linear's blocks so far are not all of one format; one of them is PLAIN; all can be BLOCKS.
    bool mixed = false, plain = false, in_blocks = false;
    Kept last_kept = {};

  private:
    void make_int8(Linear<T>& linear, int b, const std::string& name, const Tensor& t) {
        const char* path = t.file.c_str();
        const int rows = linear.rows[b], in = linear.in;
        if (!t.is_float()) DIE("%s: tensor %s is not BF16, F16, F32 or I8", path, name.c_str());
        linear.format = Format::INT8, linear.group = GROUP, linear.group_rows = 1;
        int8_t* q = own<int8_t>((size_t)rows * in, t, name);
        bf16* scale = own<bf16>((size_t)rows * linear.groups(), t, name);
        if (!to_int8(q, scale, t, rows, in))
            DIE("%s: tensor %s has an infinity or a NaN, which INT8 cannot hold", path, name.c_str());
        linear.q[b] = q, linear.scale[b] = scale;
    }
    void make_fp8(Linear<T>& linear, int b, const std::string& name, const Tensor& t) {
        const char* path = t.file.c_str();
        const size_t rows = (size_t)linear.rows[b], in = (size_t)linear.in;
        if (!t.is_float()) DIE("%s: tensor %s is not BF16, F16 or F32", path, name.c_str());
        UnsetVector<float> numbers(rows * in);
        if (!read_numbers(numbers.data(), t))
            DIE("%s: tensor %s has an infinity or a NaN, which FP8 cannot hold", path, name.c_str());
        const QuantizedMatrix m = quantize_matrix(numbers.data(), rows, in, Format::FP8, FP8_GROUP, nullptr);
        int8_t* q = own<int8_t>(rows * in, t, name);
        float* scale = own<float>(m.grids.size(), t, name);
        memcpy(q, m.q.data(), rows * in);
        for (size_t i = 0; i < m.grids.size(); i++) {
            scale[i] = m.grids[i].scale;
            if (scale[i] > 0x1p100f) DIE("%s: tensor %s has numbers too large for FP8", path, name.c_str());
        }
        linear.format = Format::FP8, linear.group_rows = FP8_GROUP;
        linear.group = std::min(FP8_GROUP, (linear.in + GROUP - 1) / GROUP * GROUP);
        linear.q[b] = q, linear.scale[b] = scale;
    }
};

template <class T> void blocks_to_int8(Weights<T>& w, const ModelFile& file) {
    WeightLoader<T> loader{w, file};
    bool blocks = false; // the Linear at work is in blocks
    for (const ModelTensor& t : model_tensors(file.config)) {
        const TensorPlace<T> place = place_of(w, t);
        if (!place.linear) continue;
        if (place.block == 0) blocks = place.linear->format == Format::BLOCKS;
        if (blocks) loader.load_block(*place.linear, place.block, t, Format::INT8, false);
    }
    if (file.config.tied) w.head = w.embed;
}

template <class T> const char* type_name(const Weights<T>& w) {
    const Linear<T>& first = w.layers.back().qkv; // (in llama.cpp's mixtures of types down has one of more bits)
    switch (last_product(w.layers.back()).format) {
        case Format::BLOCKS: return first.format == Format::BLOCKS ? block_name(first.type[0]) : "blocks";
        case Format::INT8: return "int8";
        case Format::INT4: return "int4";
        case Format::FP8: return "fp8";
        default: return std::is_same_v<T, bf16> ? "bfloat16" : std::is_same_v<T, float> ? "float32" : "float64";
    }
}

// Reads a checkpoint. Its tensors are used in place, or converted to T. made: every matrix becomes INT8; or those of the
// layers become FP8. packed: a quantised matrix keeps its format if Linear has it, else it becomes INT8. (On a GPU BLOCKS
// become INT8 too: see blocks_to_int8.)
template <class T> Weights<T>::Weights(const ModelFile& file, Format made, bool packed) {
    WeightLoader<T> loader{*this, file};
    layers.resize(file.config.L);
    for (int l = 0; l < file.config.L; l++)
        if (file.config.sparse(l)) layers[l].experts.resize(file.config.E);
    std::vector<ModelTensor> blocks; // of the Linear at work
    for (const ModelTensor& t : model_tensors(file.config)) {
        const TensorPlace<T> place = place_of(*this, t);
        if (t.kind == HEAD && !file.logits && !file.tensors.count(t.name())) continue;
        if (!place.linear) {
            *place.vector = loader.numbers(t.name(), t.shape());
            continue;
        }
        if (place.block == 0) blocks.clear();
        blocks.push_back(t);
        loader.load_block(*place.linear, place.block, t, t.kind == ROUTER ? Format::PLAIN : made, packed);
        const bool last = t.kind == V_PROJ || t.kind == UP_PROJ;
        // A product's blocks are of one format. INT8 holds all that is quantised.
        const bool some_plain = loader.plain;
        const Format common = some_plain ? made : loader.in_blocks ? Format::BLOCKS : Format::INT8;
        if (last && loader.mixed)
            for (size_t b = 0; b < blocks.size(); b++)
                loader.load_block(*place.linear, (int)b, blocks[b], common, packed && !some_plain);
    }
    if (file.config.tied) head = embed;
}

#ifndef QWEN3_DOUBLE
bool in_huge_pages(const MappedFile& map) {
    FILE* f = fopen("/proc/self/smaps", "r");
    char line[512];
    bool here = false;
    size_t begin, end, kilobytes, huge = 0;
    while (f && fgets(line, sizeof line, f)) {
        if (sscanf(line, "%zx-%zx", &begin, &end) == 2)
            here = begin < (size_t)map.data + map.size && end > (size_t)map.data;
        else if (here && (sscanf(line, "FilePmdMapped: %zu", &kilobytes) == 1 ||
                          sscanf(line, "AnonHugePages: %zu", &kilobytes) == 1)) huge += kilobytes * 1024;
    }
    if (f) fclose(f);
    return huge > map.size / 2;
}

bool copy_to_huge_pages(const MappedFile& map) {
    // The copy's offset to a multiple of 2 MB equals the mapping's, so huge pages can be moved there.
    const size_t off = (uintptr_t)map.data % HUGE_PAGE, room = map.size + 2 * HUGE_PAGE;
    uint8_t* memory = (uint8_t*)mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return false;
    uint8_t* copy = memory + (HUGE_PAGE - (uintptr_t)memory % HUGE_PAGE) % HUGE_PAGE + off;
    madvise(memory, room, MADV_HUGEPAGE);
    #pragma omp parallel for schedule(dynamic)
    for (size_t i = 0; i < map.size; i += HUGE_PAGE) memcpy(copy + i, map.data + i, std::min(HUGE_PAGE, map.size - i));
    mprotect(copy, map.size, PROT_READ);
    if (mremap(copy, map.size, map.size, MREMAP_MAYMOVE | MREMAP_FIXED, map.data) == MAP_FAILED)
        DIE("%s: moving a copy to where it is mapped: %s", map.path.c_str(), strerror(errno));
    // Unmaps the rest, before and after. (Another thread may meanwhile have allocated the copy's old place.)
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), begin = (size_t)(copy - memory);
    const size_t end = begin + (map.size + page - 1) / page * page;
    if (begin) munmap(memory, begin);
    munmap(memory + end, room - end);
    return true;
}
#endif

template <class T> void use_huge_pages(const ModelFile& file, const Weights<T>& w) {
    size_t all = 0;
    bool mapped = false; // or converted; norms may be so all the same
    const Linear<T>& last = last_product(w.layers.back());
    const void* used = last.w[0] ? (const void*)last.w[0] : last.q[0];
    for (const MappedFile& map : file.maps) all += map.size, mapped |= used >= map.data && used < map.data + map.size;
    char enabled[64] = "[never]"; // a system without such pages has no such file
    if (FILE* f = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "r")) {
        if (!fgets(enabled, sizeof enabled, f)) enabled[0] = 0;
        fclose(f);
    }
    if (strstr(enabled, "[never]") || !mapped || all < ((size_t)64 << 20) || all > available_memory() / 2)
        return;
    for (const MappedFile& map : file.maps)
        if (!in_huge_pages(map) && !copy_to_huge_pages(map)) return;
}

#define INSTANTIATE(T) \
    template Weights<T>::Weights(const ModelFile&, Format, bool); \
    template void blocks_to_int8(Weights<T>&, const ModelFile&); \
    template const char* type_name(const Weights<T>&); \
    template void use_huge_pages(const ModelFile&, const Weights<T>&);
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE
