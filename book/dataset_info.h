// book/dataset_info.h: LLaMA-Factory's dataset_info.json, read and written.
#pragma once
#include "book/conversations.h"
#include <map>
#include <set>
#include <string>

namespace book {

// An entry of LLaMA-Factory's dataset_info.json: the file it names, and how to read it.
Layout read_dataset_info(const std::string& path, const std::string& name, std::string* file);

// The rows that pack read: of which kind, with which keys and names of roles.
struct RowsRead {
    std::string kind;
    std::set<std::string> keys;
    std::map<std::string, std::set<std::string>> tags;
    bool pairs = false;
};

// Enters the file there under its name, leaves the others as they are, and reads it back.
void write_dataset_info(const std::string& path, const std::string& file, const RowsRead& rows);

} // namespace book
