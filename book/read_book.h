// book/read_book.h: a book as text: Markdown and plain text as they are, PDF by pdftotext, HTML, DOCX, EPUB by pandoc.
#pragma once
#include <string>

namespace book {

// A book as text: the file's own, or what pdftotext or pandoc make of it. `clean`: auto, yes or no.
std::string read_book(const std::string& path, const std::string& clean);

} // namespace book
