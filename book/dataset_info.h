// book/dataset_info.h: LLaMA-Factory's dataset_info.json, read and written.
#pragma once
#include "book/conversations.h"
#include <set>
#include <string>

namespace book {

// An entry of LLaMA-Factory's dataset_info.json: the file it names, and how to read it.
Layout read_dataset_info(const std::string& path, const std::string& name, std::string* file);

// Enters the file there under its name, leaves the others as they are, and reads it back.
void write_dataset_info(const std::string& path, const std::string& file, const std::string& kind,
                        const std::set<std::string>& columns, bool pairs);

} // namespace book
