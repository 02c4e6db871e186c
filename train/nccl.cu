// train/nccl.cu: NCCL, with the declarations of its documentation, loaded with dlopen.
#include "train/nccl.h"
#ifdef QWEN3_GPU
#include "qwen3.cu"
#include <dlfcn.h>
#include <vector>

struct Nccl::Library {
    enum { UINT8 = 1, FLOAT32 = 7, SUM = 0 }; // of ncclDataType_t and ncclRedOp_t
    using Comm = struct ncclComm*;
    using Reduce = int (*)(const void*, void*, size_t, int, int, Comm, cudaStream_t);
    const char* (*error)(int);
    int (*get_id)(Id*), (*init)(Comm*, int, Id, int), (*group_start)(), (*group_end)();
    Reduce all_reduce, reduce_scatter;
    int (*all_gather)(const void*, void*, size_t, int, Comm, cudaStream_t);
    Comm comm = nullptr;
    cudaStream_t main, stream; // the model's; our own, so that sums overlap the backward pass
    cudaEvent_t ready;         // main has computed the numbers to sum
    struct Wait { cudaEvent_t begun, ended; };
    std::vector<Wait> waits;   // waits of main for sums, since the last measurement
    size_t waited = 0;         // of them in use

    explicit Library(cudaStream_t model) : main(model) {
        void* library = dlopen("libnccl.so.2", RTLD_NOW);
        if (!library)
            DIE("several GPUs need NCCL: %s (apt-get install libnccl2; or pip install nvidia-nccl-cu%d, with its "
                "folder lib in LD_LIBRARY_PATH; or train without --gpus, on one)", dlerror(), CUDART_VERSION / 1000);
        auto find = [&](auto& function, const char* name) {
            function = (std::decay_t<decltype(function)>)dlsym(library, name);
            if (!function) DIE("libnccl.so.2 has no %s: it is too old", name);
        };
        find(error, "ncclGetErrorString"), find(get_id, "ncclGetUniqueId"), find(init, "ncclCommInitRank");
        find(group_start, "ncclGroupStart"), find(group_end, "ncclGroupEnd"), find(all_reduce, "ncclAllReduce");
        find(reduce_scatter, "ncclReduceScatter"), find(all_gather, "ncclAllGather");
        CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CUDA_CHECK(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming));
    }
    void check(int result, const char* what) const {
        if (result) DIE("NCCL: %s: %s (NCCL_DEBUG=INFO tells more)", what, error(result));
    }
    void begin() {
        CUDA_CHECK(cudaEventRecord(ready, main));
        CUDA_CHECK(cudaStreamWaitEvent(stream, ready, 0));
    }
    void finish() { // main continues when all sums are complete
        if (waited == waits.size()) {
            waits.emplace_back();
            for (cudaEvent_t* e : {&waits.back().begun, &waits.back().ended}) CUDA_CHECK(cudaEventCreate(e));
        }
        const Wait& wait = waits[waited++];
        CUDA_CHECK(cudaEventRecord(ready, stream));
        CUDA_CHECK(cudaEventRecord(wait.begun, main));
        CUDA_CHECK(cudaStreamWaitEvent(main, ready, 0));
        CUDA_CHECK(cudaEventRecord(wait.ended, main));
    }
    // Seconds that main has waited since the last measurement; main has completed all its work.
    double look() {
        double sum = 0;
        for (; waited > 0; waited--) {
            float ms = 0;
            CUDA_CHECK(cudaEventElapsedTime(&ms, waits[waited - 1].begun, waits[waited - 1].ended));
            sum += ms * 1e-3;
        }
        return sum;
    }
};

Nccl::Nccl(const Context& model) : library(std::make_shared<Library>(model.gpu->stream)) {}

Nccl::Id Nccl::make_id() {
    Id id = {};
    library->check(library->get_id(&id), "ncclGetUniqueId");
    return id;
}
void Nccl::join(int size, const Id& id, int rank) {
    library->check(library->init(&library->comm, size, id, rank), "ncclCommInitRank");
}
void Nccl::begin() {
    library->begin();
    library->check(library->group_start(), "ncclGroupStart");
}
void Nccl::end() { library->check(library->group_end(), "ncclGroupEnd"); }
void Nccl::all_reduce(float* x, size_t n) {
    library->check(library->all_reduce(x, x, n, Library::FLOAT32, Library::SUM, library->comm, library->stream),
                   "ncclAllReduce");
}
void Nccl::reduce_scatter(float* own, const float* x, size_t piece) {
    library->check(library->reduce_scatter(x, own, piece, Library::FLOAT32, Library::SUM, library->comm,
                                           library->stream), "ncclReduceScatter");
}
void Nccl::all_gather(void* all, const void* own, size_t bytes) {
    library->check(library->all_gather(own, all, bytes, Library::UINT8, library->comm, library->stream),
                   "ncclAllGather");
}
void Nccl::finish() { library->finish(); }
double Nccl::look() { return library->look(); }
#endif // QWEN3_GPU
