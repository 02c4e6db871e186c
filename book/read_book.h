// book/read_book.h: a book as text: Markdown and plain text as they are, PDF by pdftotext, the others by pandoc.
#pragma once
#include <string>

namespace book {

// The text of a book, which is valid UTF-8. clean: auto, yes or no, whether text is cleaned as a PDF's. filter:
// pandoc's, data/datagen/book.lua. plain: a document's text has no marks of Markdown.
std::string read_book(const std::string& path, const std::string& clean, const std::string& filter,
                      bool plain = false);

} // namespace book
