#include "book/datagen/stats.h"
#include "base/file.h"
#include "book/characters.h"
#include "book/conversations.h"
#include "book/datagen/prompt.h"
#include "book/datagen/training_rows.h"
#include "book/report.h"
#include "book/rows.h"
#include "book/text.h"
#include "model/dataset.h"
#include "model/tokenizer.h"
#include "sj.h"
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace book {

// Text left-aligned, numbers right-aligned; a CJK character is two columns wide.
static std::string cell(const std::string& s, int width) {
    int used = 0;
    for (char32_t c : decode(s)) used += is_cjk(c) || (c >= 0xFF01 && c <= 0xFF60) ? 2 : 1;
    const std::string blank((size_t)std::max(0, std::abs(width) - used), ' ');
    return width < 0 ? s + blank : blank + s;
}

namespace {

struct Lengths {
    std::string name;
    std::vector<uint32_t> values = {};
    void print() {
        if (values.empty()) return;
        std::sort(values.begin(), values.end());
        uint64_t sum = 0;
        for (uint32_t v : values) sum += v;
        std::string line = cell(name, -20) + cell(std::to_string(sum), 12);
        const size_t n = values.size();
        const uint64_t shown[] = {values[0], values[n / 2], sum / n, values[n * 95 / 100], values[n - 1]};
        for (uint64_t v : shown)
            line += cell(std::to_string(v), 9);
        printf("%s\n", line.c_str());
    }
};

using Chapters = std::map<std::string, std::map<std::string, size_t>>; // rows by chapter and difficulty

void print_chapters(Chapters& table, std::set<std::string>& difficulties) {
    Strings columns; // easy, medium, hard, then any others
    for (auto d : DIFFICULTIES)
        if (difficulties.erase(d)) columns.push_back(d);
    columns.insert(columns.end(), difficulties.begin(), difficulties.end());
    printf("\n%s", cell("chapter", -50).c_str());
    for (auto& d : columns) printf("%s", cell(d, 9).c_str());
    printf("%s\n", cell("rows", 9).c_str());
    for (auto& [chapter, counts] : table) {
        size_t sum = 0;
        printf("%s", cell(chapter.empty() ? "-" : chapter, -50).c_str());
        for (auto& d : columns) printf("%s", cell(std::to_string(counts[d]), 9).c_str()), sum += counts[d];
        printf("%s\n", cell(std::to_string(sum), 9).c_str());
    }
}

} // namespace

int run_stats(const Arguments& a) {
    Lengths tokens{"tokens"}, trained{"  trained"}, questions{"question characters"}, answers{"answer characters"};
    Chapters table;
    std::set<std::string> difficulties;
    auto take = [&](DatasetRow row) {
        tokens.values.push_back((uint32_t)row.size());
        trained.values.push_back((uint32_t)count_trained(row));
    };
    size_t rows = 0, faults = 0;
    std::set<uint64_t> hashes;
    bool packed = false;
    if (a.files[0] != "-") {
        const MappedFile file(a.files[0]);
        packed = file.size >= 8 && !memcmp(file.data, DatasetHeader().magic, 8);
    }
    if (packed) {
        const Dataset data(a.files[0]);
        const size_t each = data.labelled() ? 2 : 1; // (every second one is a mismatched row)
        for (size_t i = 0; i < data.rows(); i += each, rows++) take(data.row(i)), hashes.insert(data.hash(i));
        printf("rows      %zu, %zu of them different%s\n", rows, hashes.size(),
               data.pairs() ? "; pairs" : data.labelled() ? "; labelled answers" : "");
        printf("tokenizer %s\n", hex(data.header.tokenizer).c_str());
        printf("template  %s\n", hex(data.header.chat_template).c_str());
    } else {
        const Tokenizer tokenizer(a.tokenizer());
        Reader in(a.files[0]);
        for (Progress progress; in.next(); rows++) {
            progress.show("stats", rows, in.share());
            try {
                if (const sj::Value v = in.row(); v.is(sj::Object) && is_preference(v, {})) {
                    for (auto& row : render_pair(tokenizer, read_preference(v, {}))) take(view(row));
                } else {
                    const Conversation c = read_conversation(v);
                    for (auto& row : render_rows(tokenizer, c)) take(view(row));
                    questions.values.push_back((uint32_t)count_characters(c.question));
                    answers.values.push_back((uint32_t)count_characters(c.answer));
                }
            } catch (const Error&) {
                faults++;
            }
            const std::string difficulty = in.row()["difficulty"].str("-");
            table[top_chapter(in.row())][difficulty]++;
            difficulties.insert(difficulty);
        }
        printf("rows      %zu, %zu of them no conversation\n", rows, faults);
    }
    printf("\n%s%s\n", cell("", -20).c_str(), "         sum      min   median     mean      95%      max");
    for (Lengths* l : {&tokens, &trained, &questions, &answers}) l->print();
    for (uint32_t limit : {256, 512, 1024, 2048, 4096}) {
        const auto over = tokens.values.end() - std::upper_bound(tokens.values.begin(), tokens.values.end(), limit);
        const double share = (double)over / (double)tokens.values.size();
        if (over) printf("over %-6u%10zu rows, %.1f%%\n", limit, (size_t)over, 100 * share);
    }
    if (!table.empty()) print_chapters(table, difficulties);
    return 0;
}

} // namespace book
