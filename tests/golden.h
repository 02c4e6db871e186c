// Golden logits and greedy texts of tests/fixtures, and the distance between distributions.
#pragma once
#include "base/file.h"
#include "model/model_file.h"
#include "model/session.h"
#include "model/weights.h"
#include "sj.h"
#include "tests/common.h"
#include <algorithm>
#include <doctest/doctest.h>
#include <string>
#include <vector>

struct Golden {
    ModelFile file;
    std::vector<std::vector<int>> prompts, greedy;
    std::vector<float> logits; // (all positions of all prompts, V)
    double bf16_kl = -1;       // the better of transformers' own two

    explicit Golden(const std::string& folder, const std::string& model = "") // model: the file in it, "/model.gguf"
        : file("tests/fixtures/" + folder + model) {
        MappedFile text("tests/fixtures/" + folder + "/golden.json");
        sj::Doc doc;
        REQUIRE(sj::parse(doc, text.text()) == "");
        auto lists = [&](const char* key) {
            std::vector<std::vector<int>> out;
            for (sj::Value list : doc.root()[key].items()) {
                out.emplace_back();
                for (sj::Value id : list.items()) out.back().push_back((int)id.number());
            }
            return out;
        };
        prompts = lists("prompts"), greedy = lists("greedy");
        for (auto [name, kl] : doc.root()["transformers_bf16_mean_kl"].members())
            if (bf16_kl < 0 || kl.number() < bf16_kl) bf16_kl = kl.number();
        MappedFile raw("tests/fixtures/" + folder + "/" + doc.root()["logits"].str());
        size_t rows = 0;
        for (auto& p : prompts) rows += p.size();
        REQUIRE(rows > 0);
        REQUIRE(raw.size == rows * file.config.V * sizeof(float));
        logits.resize(rows * file.config.V);
        memcpy(logits.data(), raw.data, raw.size);
    }
};

// Mean over rows of KL(softmax(truth) || softmax(ours)), in nats.
template <class A> double mean_kl(const std::vector<float>& truth, const std::vector<A>& ours, int V) {
    double sum = 0;
    const size_t rows = truth.size() / V;
    for (size_t r = 0; r < rows; r++) {
        const float* p = &truth[r * V];
        const A* q = &ours[r * V];
        double top_p = *std::max_element(p, p + V), top_q = *std::max_element(q, q + V), zp = 0, zq = 0, kl = 0;
        for (int v = 0; v < V; v++) zp += std::exp(p[v] - top_p), zq += std::exp(q[v] - top_q);
        for (int v = 0; v < V; v++) {
            double lp = p[v] - top_p - std::log(zp), lq = q[v] - top_q - std::log(zq);
            kl += std::exp(lp) * (lp - lq);
        }
        sum += kl;
    }
    return sum / (double)rows;
}

// Logits at all positions of its prompts, by these weights. plain: as defined.
template <class T> std::vector<acc<T>> logits_by(const Weights<T>& w, const Golden& g, bool plain) {
    std::vector<acc<T>> out;
    Context ctx;
    ctx.plain = plain;
    for (auto& prompt : g.prompts) {
        Session<T> session(g.file.config, w, 64, ctx);
        session.feed(prompt, nullptr, [&](const acc<T>* row) { out.insert(out.end(), row, row + g.file.config.V); });
    }
    return out;
}
