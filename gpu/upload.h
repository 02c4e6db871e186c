// gpu/upload.h: weights to a GPU.
#pragma once
#include "model/weights.h"

// What goes to the GPU: bytes of the CPU's memory, and where in the weights' arena.
struct UploadPiece { const void* from; size_t to, bytes; };

// Places a packed matrix in the arena, its blocks one after another: numbers, scales, and INT4's zero points, which all
// blocks have if one has them. FP8's blocks of rows go on from block to block only where they are whole; else each row
// gets scales of its own. With `pieces`, says what to copy and points there; `made` keeps what no file holds.
template <class T>
void place_packed(Arena& gpu, Linear<T>& W, std::vector<UploadPiece>* pieces,
                  std::vector<std::vector<uint8_t>>& made) {
    const size_t groups = (size_t)W.groups(), size = W.format == Format::FP8 ? sizeof(float) : sizeof(uint16_t);
    bool whole = true, zeros = false;
    for (int b = 0; b < 3; b++) {
        zeros |= W.zero[b] != nullptr;
        whole &= b == 2 || !W.rows[b + 1] || W.rows[b] % W.group_rows == 0;
    }
    const int group_rows = whole ? W.group_rows : 1;
    auto scale_rows = [&](int b) { return (size_t)(W.rows[b] + group_rows - 1) / group_rows; };
    int8_t* q = gpu.take<int8_t>((size_t)W.out() * W.row_bytes());
    uint8_t* scale = gpu.take<uint8_t>((scale_rows(0) + scale_rows(1) + scale_rows(2)) * groups * size);
    uint8_t* zero = zeros ? gpu.take<uint8_t>((size_t)W.out() * groups) : nullptr;
    if (!pieces) return;
    auto put = [&](const void* from, const void* to, size_t bytes) {
        pieces->push_back({from, (size_t)((const uint8_t*)to - gpu.base), bytes});
    };
    for (int b = 0; b < 3 && W.rows[b]; b++) {
        const size_t rows = (size_t)W.rows[b], row_bytes = groups * size;
        const uint8_t* scales = (const uint8_t*)W.scale[b];
        if (!whole) {
            std::vector<uint8_t>& each = made.emplace_back(rows * row_bytes);
            for (size_t r = 0; r < rows; r++)
                memcpy(&each[r * row_bytes], scales + r / (size_t)W.group_rows * row_bytes, row_bytes);
            scales = each.data();
        }
        if (zeros && !W.zero[b]) made.emplace_back(rows * groups, (uint8_t)8);
        put(W.q[b], q, rows * W.row_bytes()), put(scales, scale, scale_rows(b) * row_bytes);
        if (zeros) put(W.zero[b] ? W.zero[b] : made.back().data(), zero, rows * groups);
        W.q[b] = q, W.scale[b] = scale, W.zero[b] = zero;
        q += rows * W.row_bytes(), scale += scale_rows(b) * row_bytes, zero += zeros ? rows * groups : 0;
    }
    W.group_rows = group_rows;
}

// Room for the largest matrix of a layer as bf16; and for parts of embedding and head, which are larger (packed.h).
constexpr size_t LEAST_UNPACKED = 32 << 20; // numbers
inline size_t unpacked_numbers(const Config& c) {
    const size_t C = (size_t)c.C, head = (size_t)c.V * C, wide = (size_t)(c.H + 2 * c.K) * c.D;
    return std::max({C * wide, 2 * C * (size_t)c.F, std::min(head, std::max(LEAST_UNPACKED, (size_t)c.V * 64))});
}

#ifdef __CUDACC__
// What the kernels can compute, else one line.
inline void check_gpu(const std::string& name, const Config& c, bool logits = true) {
    const char* n = name.c_str();
    if (c.D != 64 && c.D != 128)
        DIE("%s: the GPU's kernels are for heads of 64 and 128, not %d (--device cpu)", n, c.D);
    if (c.H / c.K > 128)
        DIE("%s: %d query heads a key/value head; the GPU's kernels take 128 (--device cpu)", n, c.H / c.K);
    if (c.C % 8 || c.F % 8 || (c.V % 8 && logits))
        DIE("%s: the GPU's kernels need hidden size (%d), ffn size (%d) and vocabulary rows (%d) in multiples of 8 "
            "(--device cpu)", n, c.C, c.F, c.V);
}

// Copies all to the GPU and lets every pointer point there, the blocks of a Linear one after another. The CPU's threads
// read the mapped file into one pinned buffer while the other one is on its way: so the link sets the pace, not the
// page faults.
template <class T> void Weights<T>::upload(Context& ctx, const ModelFile& file) {
    check_gpu(file.path, file.config, file.logits);
    std::vector<UploadPiece> pieces;
    std::vector<std::vector<uint8_t>> made;
    gpu.gpu = true;
    bool packed = false; // one of them is
    for (bool planned : {false, true}) {
        T* to = nullptr;
        for (const ModelTensor& t : model_tensors(file.config)) {
            const TensorPlace<T> place = place_of(*this, t);
            if (place.linear && place.linear->format != Format::PLAIN) {
                if (place.block == 0) place_packed(gpu, *place.linear, planned ? &pieces : nullptr, made);
                packed = true;
                continue;
            }
            if (!place.numbers()) continue; // a head that the file has not got
            if (place.block == 0) to = gpu.take<T>(place.linear ? (size_t)place.linear->out() * t.columns : t.size());
            if (planned) {
                pieces.push_back({place.numbers(), (size_t)((uint8_t*)to - gpu.base), t.size() * sizeof(T)});
                place.numbers() = to;
                to += t.size();
            }
        }
        if (packed) {
            ctx.gpu->unpacked_numbers = unpacked_numbers(file.config);
            ctx.gpu->unpacked = gpu.take<bf16>(ctx.gpu->unpacked_numbers);
        }
        if (!planned) gpu.allocate("the model");
    }
    if (file.config.tied) head = embed;
    // (The blocks of a packed Linear: its weights lie together, its scales behind them.)
    std::sort(pieces.begin(), pieces.end(), [](const UploadPiece& a, const UploadPiece& b) { return a.to < b.to; });

    constexpr size_t BUFFER = 16 << 20;
    uint8_t* buffer[2];
    cudaEvent_t sent[2];
    for (int i = 0; i < 2; i++) {
        CUDA_CHECK(cudaMallocHost(&buffer[i], BUFFER));
        CUDA_CHECK(cudaEventCreateWithFlags(&sent[i], cudaEventDisableTiming));
    }
    size_t start = 0, piece = 0, done = 0; // the buffer stands for the arena from `start` on; bytes done of a piece
    for (int turn = 0; piece < pieces.size(); turn ^= 1) {
        CUDA_CHECK(cudaEventSynchronize(sent[turn]));
        start = pieces[piece].to + done;
        size_t end = start;
        while (piece < pieces.size() && pieces[piece].to + done < start + BUFFER) {
            const UploadPiece& p = pieces[piece];
            const size_t at = p.to + done - start, n = std::min(p.bytes - done, BUFFER - at), part = 1 << 19;
            #pragma omp parallel for schedule(static) if (n > part)
            for (size_t i = 0; i < (n + part - 1) / part; i++)
                memcpy(buffer[turn] + at + i * part, (const uint8_t*)p.from + done + i * part,
                       std::min(part, n - i * part));
            end = start + at + n;
            done += n;
            if (done == p.bytes) piece++, done = 0;
        }
        CUDA_CHECK(cudaMemcpyAsync(gpu.base + start, buffer[turn], end - start, cudaMemcpyHostToDevice,
                                   ctx.gpu->stream));
        CUDA_CHECK(cudaEventRecord(sent[turn], ctx.gpu->stream));
    }
    CUDA_CHECK(cudaStreamSynchronize(ctx.gpu->stream));
    for (int i = 0; i < 2; i++) cudaFreeHost(buffer[i]), cudaEventDestroy(sent[i]);
    converted.clear();
}
#endif // __CUDACC__
