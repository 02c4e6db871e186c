// book/pages.h: cleans the text that read_book.cpp gets from a PDF: page breaks, page numbers, running heads and
// hyphens are removed.
#pragma once
#include <cstddef>
#include <string>
#include <string_view>

namespace book {

// The page number that a line consists of: "12", "- 12 -", "Page 12 of 300", "第 12 页"; in front matter "xii".
// -1: not a page number.
long page_number(std::string_view line);

// Text of a PDF, without the parts that belong to its pages.
struct CleanText {
    std::string text;
    size_t breaks = 0, numbers = 0, heads = 0, hyphens = 0; // number of parts removed
};

// Whether a page, as pdftotext -layout writes it, has two columns of prose. (A table has short cells: it is none.)
bool in_columns(std::string_view page);

bool was_pdf(std::string_view book);

// Removes page breaks, page numbers, running heads and feet, hyphens at line ends and ligatures.
CleanText clean_pages(std::string_view book);

} // namespace book
