// metrics.cpp: vLLM's names; for HTTP, those of the instrumentation that it uses.
#include "server/engine/disk_pages.h"
#include "server/http/exchange.h"
#include "server/http/log.h"
#include <ctime>
#include <vector>

namespace server {

std::string Exchange::metrics() {
    std::vector<Figures> each; // engines may be added until the server is ready
    if (server.ready) each = server.desk.look_at_each();
    Figures f;
    for (const Figures& one : each) f.add(one);
    const std::string label = format("model_name=\"%s\"", server.ready ? server.service.name.c_str() : "");
    std::string out;
    auto one = [&](const char* name, const char* type, double value, const char* more = "") {
        if (out.find(format("# TYPE vllm:%s ", name)) == std::string::npos)
            out += format("# TYPE vllm:%s %s\n", name, type);
        out += format("vllm:%s{%s%s} %.17g\n", name, label.c_str(), more, value);
    };
    auto histogram = [&](const char* name, const Histogram& h) {
        out += format("# TYPE vllm:%s histogram\n", name);
        out += histogram_text(format("vllm:%s", name).c_str(), label, h);
    };
    one("num_requests_running", "gauge", (double)f.running);
    one("num_requests_waiting", "gauge", (double)f.waiting);
    one("kv_cache_usage_perc", "gauge", f.pages ? (double)f.pages_used / (double)f.pages : 0);
    one("num_preemptions_total", "counter", (double)f.preempted);
    one("prompt_tokens_total", "counter", (double)f.prompt_tokens);
    one("generation_tokens_total", "counter", (double)f.answer_tokens);
    one("forced_tokens_total", "counter", (double)f.forced);
    one("prefix_cache_queries_total", "counter", (double)f.looked_up);
    one("prefix_cache_hits_total", "counter", (double)f.found);
    if (server.ready && server.service.disk) {
        const DiskPages::Counts c = server.service.disk->counts();
        one("external_prefix_cache_queries_total", "counter", (double)f.disk_looked_up);
        one("external_prefix_cache_hits_total", "counter", (double)f.disk_found);
        one("disk_cache_bytes", "gauge", (double)c.bytes);
        one("disk_cache_pages", "gauge", (double)c.pages);
        one("disk_cache_read_bytes_total", "counter", (double)c.read);
        one("disk_cache_written_bytes_total", "counter", (double)c.written);
        one("disk_cache_removed_pages_total", "counter", (double)c.removed);
        one("disk_cache_damaged_pages_total", "counter", (double)c.damaged);
    }
    one("request_success_total", "counter", (double)f.stopped, ",finished_reason=\"stop\"");
    one("request_success_total", "counter", (double)f.cut, ",finished_reason=\"length\"");
    one("request_success_total", "counter", (double)f.cancelled, ",finished_reason=\"abort\"");
    one("dropped_answers_total", "counter", (double)server.desk.unsent.lost);
    one("dropped_requests_total", "counter", (double)server.bodies.lost);
    one("dropped_log_lines_total", "counter", (double)server.log->lost);
    histogram("time_to_first_token_seconds", f.first_token);
    histogram("inter_token_latency_seconds", f.between_tokens);
    histogram("e2e_request_latency_seconds", f.whole);
    auto by_engine = [&](const char* name, const char* type, auto value) {
        for (size_t k = 0; k < each.size() && each.size() > 1; k++)
            one(name, type, (double)value(each[k]), format(",engine=\"%zu\"", k).c_str());
    };
    by_engine("engine_requests_running", "gauge", [](auto& e) { return e.running; });
    by_engine("engine_requests_waiting", "gauge", [](auto& e) { return e.waiting; });
    by_engine("engine_pages_used", "gauge", [](auto& e) { return e.pages_used; });
    by_engine("engine_prompt_tokens_total", "counter", [](auto& e) { return e.prompt_tokens; });
    by_engine("engine_generation_tokens_total", "counter", [](auto& e) { return e.answer_tokens; });
    by_engine("engine_prefix_cache_hits_total", "counter", [](auto& e) { return e.found; });
    if (server.ready) out += adapter_metrics(server.service.adapters->now());
    return out + server.traffic.text();
}

std::string Exchange::adapter_metrics(const std::map<std::string, AdapterPtr>& all) {
    if (all.empty()) return "";
    std::string running, waiting, tokens = "# TYPE vllm:lora_generation_tokens_total counter\n";
    for (auto& [name, one] : all) {
        if (one->running) running += (running.empty() ? "" : ",") + name;
        if (one->waiting) waiting += (waiting.empty() ? "" : ",") + name;
        tokens += format("vllm:lora_generation_tokens_total{lora_name=\"%s\"} %llu\n", name.c_str(),
                         (unsigned long long)one->tokens);
    }
    return format("# TYPE vllm:lora_requests_info gauge\nvllm:lora_requests_info{running_lora_adapters=\"%s\","
                  "waiting_lora_adapters=\"%s\",max_lora=\"%zu\"} %ld\n",
                  running.c_str(), waiting.c_str(), MAX_ADAPTERS, (long)time(nullptr)) + tokens;
}

} // namespace server
