// book/read_book.h: reads a book as text: Markdown and plain text as they are, PDF by pdftotext, the others by pandoc.
#pragma once
#include <string>

namespace book {

// The text of a book, as valid UTF-8. clean: auto, yes or no, whether to clean the text as a PDF's. filter:
// pandoc's, data/datagen/book.lua. plain: without Markdown marks for a document.
std::string read_book(const std::string& path, const std::string& clean, const std::string& filter,
                      bool plain = false);

} // namespace book
