// model/upload.cu: weights to a GPU, in pieces through pinned buffers.
#ifdef QWEN3_GPU
#include "model/device.h"
#include "model/upload.h"
#include "model/weights.h"
#include "qwen3.cu"
#include <algorithm>
#include <cstring>
#include <vector>

// A layer's experts must have one format, which their kernels take.
static void check_experts(const std::string& path, const std::vector<Layer<bf16>>& layers) {
    for (const Layer<bf16>& layer : layers)
        for (const Expert<bf16>& e : layer.experts)
            for (auto which : {&Expert<bf16>::gate_up, &Expert<bf16>::down})
                if (const Linear<bf16>&W = e.*which, &first = layer.experts[0].*which;
                    W.format != first.format || W.group != first.group || !W.zero[0] != !first.zero[0])
                    DIE("%s: its experts are not all in one packed format (without --packed they become bfloat16)",
                        path.c_str());
}

// Copies pieces, in order of their place, to the arena. The CPU's threads read the mapped file into one pinned buffer
// while the other one is being copied: so the link limits the rate, not page faults.
static void send(Context& ctx, const Arena& gpu, const std::vector<UploadPiece>& pieces) {
    constexpr size_t BUFFER = 16 << 20;
    uint8_t* buffer[2];
    cudaEvent_t sent[2];
    for (int i = 0; i < 2; i++) {
        CUDA_CHECK(cudaMallocHost(&buffer[i], BUFFER));
        CUDA_CHECK(cudaEventCreateWithFlags(&sent[i], cudaEventDisableTiming));
    }
    size_t start = 0, piece = 0, done = 0; // the buffer holds the arena from `start` on; bytes done of a piece
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
}

// Copies all to the GPU and changes every pointer, the blocks of a Linear one after another.
template <> void Weights<bf16>::upload(Context& ctx, const ModelFile& file) {
    check_gpu(file.path, file.config, file.logits);
    blocks_to_int8(*this, file);
    check_experts(file.path, layers);
    std::vector<UploadPiece> pieces;
    std::vector<std::vector<uint8_t>> made;
    gpu.gpu = true;
    bool packed = false; // one of them is
    for (bool planned : {false, true}) {
        bf16* to = nullptr;
        for (const ModelTensor& t : model_tensors(file.config)) {
            const TensorPlace<bf16> place = place_of(*this, t);
            if (place.linear && place.linear->format != Format::PLAIN) {
                if (!Optional::HERE)
                    DIE("%s: a portable build has no packed weights on a GPU (without --packed they become bfloat16)",
                        file.path.c_str());
                if (place.block == 0) place_packed(gpu, *place.linear, planned ? &pieces : nullptr, made);
                packed = true;
                continue;
            }
            if (!place.numbers()) continue; // a head that the file does not have
            if (place.block == 0)
                to = gpu.take<bf16>(place.linear ? (size_t)place.linear->out() * t.columns : t.size());
            if (planned) {
                pieces.push_back({place.numbers(), (size_t)((uint8_t*)to - gpu.base), t.size() * sizeof(bf16)});
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
    send(ctx, gpu, pieces);
    converted.clear();
}
#endif // QWEN3_GPU
