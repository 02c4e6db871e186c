// model/draw_ahead.cu: the draws of a session on a GPU, a graph a step.
#ifdef QWEN3_GPU
#include "model/draw_ahead.h"
#include "model/graph.h"
#include "qwen3.cu"

std::shared_ptr<DrawsAhead> gpu_draws(Session<bf16>& session) { return std::make_shared<GpuDraws>(session); }

GpuDraws::~GpuDraws() {
    cudaStreamSynchronize(ctx.gpu->stream);
    for (auto& [key, graph] : graphs) cudaGraphExecDestroy(graph);
    if (ring) cudaFreeHost((void*)ring), cudaFreeHost(host_rows);
}

void GpuDraws::plan() {
    Arena& arena = session.arena;
    const Config& c = session.config;
    plan_scratch(ctx, arena, c, session.chunk, 1, session.capacity, session.pages);
    step.token = arena.take<int>(4 * ROWS), step.pos = step.token + ROWS, step.slot = step.pos + ROWS;
    seq = step.slot + ROWS;
    seen = arena.take<uint32_t>(c.V);
    draw_parameters = arena.take<Draw>(ROWS);
    best = arena.take<unsigned long long>(ROWS * BEST_BLOCKS);
}

int GpuDraws::tokens() {
    if (!asked) road = Optional::one_kernel(ctx, session.config, session.weights), asked = true;
    return road ? std::min({road->most, session.chunk, Session<bf16>::ROWS}) : 1;
}

void GpuDraws::begin(size_t most) {
    CUDA_CHECK(cudaStreamSynchronize(ctx.gpu->stream)); // steps that an answer before this one left behind
    const int capacity = session.capacity;
    if (!ring) {
        const size_t ring_size = (size_t)capacity + 1;
        CUDA_CHECK(cudaHostAlloc((void**)&ring, ROWS * ring_size * sizeof(int), cudaHostAllocMapped));
        CUDA_CHECK(cudaHostGetDevicePointer((void**)&step.ring, (void*)ring, 0));
        CUDA_CHECK(cudaHostAlloc((void**)&host_rows, 3 * ROWS * sizeof(int), cudaHostAllocDefault));
        const std::vector<int> zeros(ROWS);
        copy_in(ctx, seq, zeros.data(), zeros.size());
        step.ring_size = capacity + 1, step.seq = seq;
        step.pages = session.table, step.max_pages = session.pages;
    }
    const auto& d = session.drawing;
    penalties = has_penalties(d.how);
    const int V = session.config.V;
    if (penalties) copy_in(ctx, seen, seen_counts(session.ids, d.answer, V).data(), (size_t)V);
    step.seen = penalties ? seen : nullptr;
    tokens(); // (finds the road)
    const int n = (int)session.ids.size(), pos = n - 1;
    const std::vector<Draw> parameters(ROWS, {d.how, d.exist});
    copy_in(ctx, draw_parameters, parameters.data(), parameters.size());
    copy_in(ctx, step.pos, &pos, 1);
    for (int p = 0; p <= capacity; p++) ring[p] = 0;
    last = (int)std::min((size_t)capacity, n + std::min(most, (size_t)capacity) - 1);
    launched = n;
    const bool looks_up = session.lookup.most && !penalties;
    for (int N = 1; looks_up && N <= tokens(); N++) road_step(N); // (else its first time would seem long)
    text = session.ids, proposed.clear(), expected = -1, from_idle = false, row_known = true;
    launch_draw(session.last_row);
}

int GpuDraws::next() {
    const int p = (int)session.ids.size();
    if (session.lookup.most && !penalties) {
        while ((int)text.size() <= p) go_on(), take();
        go_on(); // before control returns to the caller
        return text[p];
    }
    while (launched < std::min(p + AHEAD, last)) launch_step();
    return wait(0, p);
}

int GpuDraws::wait(int row, int pos) {
    const volatile int& drawn = ring[(size_t)row * step.ring_size + pos];
    for (int spins = 0; !drawn; spins++)
        if (spins % 4096 == 4095) { // a GPU fault must not block forever
            const cudaError_t e = cudaStreamQuery(ctx.gpu->stream);
            if (e != cudaErrorNotReady) CUDA_CHECK(e);
        }
    if (road) road->check();
    return drawn - 1;
}

void GpuDraws::go_on() {
    const int known = (int)text.size(), under_way = launched + 1 - known;
    if (!proposed.empty() || under_way > 1 || launched >= last) return;
    const std::vector<int> next = session.lookup.propose(text, (size_t)std::min(last - known, tokens() - 1));
    if (!next.empty() && under_way) return void(expected = next[0]);
    if (!under_way) started = seconds();
    if (!next.empty()) return launch_proposed(next);
    if (!under_way) from_idle = true;
    if (!row_known) put_rows({text.back()});
    row_known = true;
    while (launched < std::min(known + 1, last)) launch_step();
}

void GpuDraws::take() {
    const int p = (int)text.size();
    LookUp& lookup = session.lookup;
    if (proposed.empty()) {
        text.push_back(wait(0, p));
        if (expected >= 0) lookup.foreseen(text.back() == expected);
        lookup.came(1, seconds(), started, from_idle);
        expected = -1, from_idle = false;
        return;
    }
    const int n = (int)proposed.size();
    std::vector<int> drawn;
    for (int r = 0; r <= n; r++) drawn.push_back(wait(r, p + r));
    lookup.came(drawn.size(), seconds(), started, true);
    for (int r = 0; r <= n; r++) {
        text.push_back(drawn[r]);
        if (r == n) break;
        lookup.judged(drawn[r] == proposed[r]);
        if (drawn[r] != proposed[r]) break;
    }
    launched = (int)text.size() - 1;
    proposed.clear();
}

void GpuDraws::put_rows(const std::vector<int>& ids) {
    for (int r = 0; r < (int)ids.size(); r++) {
        host_rows[r] = ids[r];
        host_rows[ROWS + r] = host_rows[2 * ROWS + r] = (int)text.size() - 1 + r; // (the identity table)
    }
    CUDA_CHECK(cudaMemcpyAsync(step.token, host_rows, 3 * ROWS * sizeof(int), cudaMemcpyHostToDevice,
                               ctx.gpu->stream));
}

void GpuDraws::launch_proposed(const std::vector<int>& next) {
    std::vector<int> ids = {text.back()};
    ids.insert(ids.end(), next.begin(), next.end());
    for (size_t r = 0; r < ids.size(); r++) ring[r * (size_t)step.ring_size + text.size() + r] = 0;
    put_rows(ids);
    launch_road_step((int)ids.size());
    launched = (int)text.size() - 1 + (int)ids.size();
    proposed = next, row_known = false;
}

void GpuDraws::launch_draw(const int* row) {
    const size_t V = session.config.V;
    const RowsDealt dealt = draw_head_gpu(ctx, session.row_logits, draw_parameters, step.seen, best,
                                          session.activations.normed, row, session.weights.head, 1);
    sample_gpu(ctx, true, session.row_logits, V, draw_parameters, best, dealt, step, 1);
}

cudaGraphExec_t GpuDraws::road_step(int N) {
    cudaGraphExec_t& graph = graphs[-4 * N - penalties - 2 * greedy()];
    if (!graph) graph = record_graph(ctx, [&] { record_road_step(N); });
    return graph;
}

void GpuDraws::record_road_step(int N) {
    road->use({N, 1, step.token, step.pos, step.seq, step.slot, session.table, session.pages, N == 1},
              session.cache, session.rope, session.row_logits, draw_parameters, best);
    road->draw_to(greedy(), step, step.seen);
    road->launch_step();
    if (greedy()) return;
    const size_t V = session.config.V;
    sample_gpu(ctx, false, session.row_logits, V, draw_parameters, best, road->dealt(), step, N);
}

void GpuDraws::launch_step() {
    if (road) return launch_road_step(1), void(launched++);
    const int splits = splits_for_graph(launched, session.capacity);
    cudaGraphExec_t& graph = graphs[2 * splits + penalties];
    if (!graph) {
        ctx.stop = nullptr;
        graph = record_graph(ctx, [&] {
            const Batch batch = {1, 1, step.token, step.pos, step.seq, step.slot, session.table, session.pages, 1,
                                 splits};
            forward(ctx, session.config, session.weights, batch, session.activations, session.cache, session.rope);
            launch_draw(session.table); // row 0
        });
    }
    CUDA_CHECK(cudaGraphLaunch(graph, ctx.gpu->stream));
    launched++;
}
#endif // QWEN3_GPU
