#include "book/datagen/nearest_answer.h"
#include "book/datagen/score.h"
#include <cmath>

namespace book {

std::unordered_map<std::string, double> NearestAnswer::counted(const Jieba& jieba, std::string_view question) {
    std::unordered_map<std::string, double> count;
    std::vector<std::string_view> pieces;
    jieba.cut(pieces, question);
    for (std::string_view word : pieces) {
        if (is_blank(word)) continue;
        std::string lower(word);
        for (char& c : lower) c = (char)(c >= 'A' && c <= 'Z' ? c | 32 : c);
        count[lower]++;
    }
    return count;
}

double NearestAnswer::idf(size_t rows_with_it) const {
    return std::log((1 + (double)answers.size()) / (1 + (double)rows_with_it)) + 1;
}

NearestAnswer::NearestAnswer(const Jieba& jieba, const ScoreFile& train) {
    for (const ScoreFile::Row& row : train.rows) {
        const ScoreReference r(train, row);
        for (auto& [word, count] : counted(jieba, r.question))
            postings[word].push_back({(uint32_t)answers.size(), count});
        answers.push_back(without_thought(r.answer));
    }
    std::vector<double> squares(answers.size(), 0);
    for (auto& [word, list] : postings)
        for (Posting& p : list) p.weight *= idf(list.size()), squares[p.row] += p.weight * p.weight;
    for (auto& [word, list] : postings)
        for (Posting& p : list) p.weight /= std::sqrt(squares[p.row]);
}

std::pair<size_t, double> NearestAnswer::find(const Jieba& jieba, std::string_view question) const {
    std::vector<double> cosine(answers.size(), 0);
    double squares = 0;
    for (auto& [word, count] : counted(jieba, question)) {
        const auto found = postings.find(word);
        if (found == postings.end()) continue;
        const double weight = count * idf(found->second.size());
        squares += weight * weight;
        for (const Posting& p : found->second) cosine[p.row] += weight * p.weight;
    }
    size_t best = 0; // sums of equal terms differ in their last bits, depending on the order of the words
    for (size_t i = 1; i < cosine.size(); i++)
        if (cosine[i] > cosine[best] + 1e-9 * cosine[best]) best = i;
    return {best, squares > 0 ? cosine[best] / std::sqrt(squares) : 0};
}

std::string NearestAnswer::answer(const Jieba& jieba, std::string_view question) const {
    const auto [row, cosine] = find(jieba, question);
    return cosine > 0 ? answers[row] : "";
}

} // namespace book
