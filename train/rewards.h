// train/rewards.h: rewards of answers, for train_lora --grpo.
//
//   Reward reward = make_reward("0.5*length:200", 60); // a weight, a name, its argument; a program's seconds
//   std::vector<double> r = reward.of(answers);        // a number for each; throws Error
//
//   exact           1 if the answer is the row's (white space at both ends apart), else 0
//   choice          1 if it names the letter that the row's answer names (book/datagen/score.h's rule), else 0
//   rouge-l         ROUGE-L against the row's answer, 0 to 1 (score.h's, over jieba's words)
//   regex:PATTERN   1 if the pattern (POSIX extended) is found in the answer, else 0
//   length:N        0 up to N tokens; longer ones fall to -1 at 2 N
//   a folder        that of a reward model (train_lora --reward-model): its score
//   a program       any other name with a /: it gets a line of JSON for each answer and prints a number a line
//
// exact, choice and rouge-l ignore a thought before the answer. A program is started once for all answers of a step, in
// its own process group, which is ended when the program has answered or its time is over.
#pragma once
#include <functional>
#include <string>
#include <string_view>
#include <vector>

// An answer, and its question. Valid UTF-8.
struct Answered {
    std::string prompt, text, reference; // prompt: the tokens' text, with the template; reference: the row's answer
    size_t tokens = 0;                   // of the answer, its end too
    bool ended = false;                  // by itself
};

struct Reward {
    std::string name; // as given, without the weight
    double weight = 1;
    std::function<std::vector<double>(const std::vector<Answered>&)> of; // empty: a reward model's, whose folder is name
    std::function<void(const Answered&)> check; // throws Error if a row of the dataset is unsuitable; or empty
};

// The number of choices of a question: lines that begin with A, B, C, .. in turn, and a sign after the letter.
size_t count_choices(std::string_view question);

// Makes a reward from its name and weight; `limit`: seconds for a program. Throws Error.
Reward make_reward(const std::string& spec, double limit);
