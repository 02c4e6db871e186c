// train/questions.h: the questions of a run, which the model answers before the first step and at each evaluation.
#pragma once
#include "model/dataset.h"
#include "model/model_file.h"
#include "model/tokenizer.h"
#include "train/options.h"
#include <memory>
#include <string>
#include <vector>

// --ask's; else the first of the evaluation rows; else none. Answers are greedy and of at most TOKENS tokens.
struct Questions {
    static constexpr size_t DEFAULT = 3;
    static constexpr int TOKENS = 200;

    struct Question {
        std::string text, reference; // reference: the row's answer; "": none
        std::vector<int> prompt;
    };
    std::vector<Question> list;
    std::unique_ptr<Tokenizer> tokenizer; // if there are questions
    int tokens = 0, positions = 0;        // of an answer; of a prompt and its answer

    Questions() = default;
    Questions(const TrainOptions& o, const Config& c, const Dataset* eval);

  private:
    void read(const Dataset& eval, size_t unit, const Config& c);
    void add(Question&& q);
};
inline const Questions NO_QUESTIONS;
