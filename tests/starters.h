// tests/starters.h: a copy of a model with starters, the questions that a chat begins with.
#pragma once
#include "model/write.h"

inline std::string with_starters(const std::string& model, const Starters& starters, const std::string& to) {
    ModelFile file(model);
    file.starters = starters;
    write_model(file, to);
    return to;
}
