// book/pages.h: text that was a PDF, made one text again: without page breaks, page numbers, running heads and hyphens.
#pragma once
#include <cstddef>
#include <string>
#include <string_view>

namespace book {

// The number that a line consists of, as pages are numbered: "12", "- 12 -", "Page 12 of 300", "第 12 页"; in front
// matter "xii". -1: it is no such line.
long page_number(std::string_view line);

// Text that was a PDF, without what was only on the pages.
struct CleanText {
    std::string text;
    size_t breaks = 0, numbers = 0, heads = 0, hyphens = 0; // what is gone
};

// Is a page, as pdftotext -layout writes it, in two columns of prose? (A table is not: its cells are short.)
bool in_columns(std::string_view page);

bool was_pdf(std::string_view book);

// Page breaks, page numbers, running heads and feet, hyphens at line ends and ligatures go.
CleanText clean_pages(std::string_view book);

} // namespace book
