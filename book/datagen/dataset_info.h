// book/datagen/dataset_info.h: reads and writes LLaMA-Factory's dataset_info.json.
#pragma once
#include "book/conversations.h"
#include <map>
#include <set>
#include <string>

namespace book {

// An entry of LLaMA-Factory's dataset_info.json: the file it names, and how to read that.
Layout read_dataset_info(const std::string& path, const std::string& name, std::string* file);

// The rows that pack read: their kind, keys and names of roles.
struct RowsRead {
    std::string kind;
    std::set<std::string> keys;
    std::map<std::string, std::set<std::string>> tags;
    bool pairs = false;
};

// Enters the file under its name, keeps all other entries, and reads the result back.
void write_dataset_info(const std::string& path, const std::string& file, const RowsRead& rows);

} // namespace book
