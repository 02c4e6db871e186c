// cli/table.h: a Markdown table with aligned columns.
#pragma once
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace cli {

// The line below a table's head: | --- | :-: |
bool is_table_rule(std::string_view line);

// The table, each line with its end. rows: its lines as in Markdown, the rule second. Columns that are too wide for the
// terminal break their cells' lines. "": it has too many columns.
std::string draw_table(const std::vector<std::string>& rows, size_t columns);

} // namespace cli
