// book/datagen/nearest_answer.h: the training row with the nearest question, a baseline of `datagen score`.
#pragma once
#include "book/datagen/score_rows.h"
#include "book/jieba.h"
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace book {

// The answer of the training row whose question is nearest by TF-IDF: scikit-learn's TfidfVectorizer over jieba's words
// in lower case (smoothed idf, cosine); on ties the first row. A plain search would return it.
class NearestAnswer {
    struct Posting {
        uint32_t row;
        double weight;
    };
    std::vector<std::string> answers;
    std::unordered_map<std::string, std::vector<Posting>> postings;

    static std::unordered_map<std::string, double> counted(const Jieba& jieba, std::string_view question);
    double idf(size_t rows_with_it) const;

  public:
    NearestAnswer(const Jieba& jieba, const ScoreFile& train);
    // Its number and the cosine; 0 if no word is shared.
    std::pair<size_t, double> find(const Jieba& jieba, std::string_view question) const;
    std::string answer(const Jieba& jieba, std::string_view question) const;
};

} // namespace book
