// train/recipe.h: recipes in the words of LLaMA-Factory's YAML files, translated to commands of datagen and train_lora.
#pragma once
#include <string>
#include <vector>

struct Recipe {
    using Words = std::vector<std::string>;
    std::vector<Words> packs;           // arguments of `datagen pack`, without -z
    Words options;                      // arguments of train_lora
    std::vector<std::string> remarks;   // keys that change nothing here, and other differences
};

// A recipe is lines of `key: value`. A key that is left out has LLaMA-Factory's default. Each key is translated, has no
// effect here (a remark names it), or is refused by its name: throws Error.
Recipe read_recipe(const std::string& path);

// The command that a shell takes for these words.
std::string shell_command(const std::string& program, const Recipe::Words& words);
