// book/read_book.h: reads a book as text: Markdown and plain text as they are, PDF by pdftotext, the others by pandoc.
#pragma once
#include "base/error.h"
#include "base/options.h" // interrupted
#include "base/stop_flag.h"
#include "book/report.h"
#include <functional>
#include <string>
#include <string_view>

namespace book {

// Whether a file is converted: by the ending of its name, or since it begins as a PDF.
bool is_document(const std::string& path, std::string_view bytes);

// clean: auto, yes or no, whether to clean the text as a PDF's. filter: pandoc's, data/datagen/book.lua. plain: without
// Markdown marks for a document. tell: takes a line about pages or about what was cleaned.
struct Reading {
    std::string clean, filter;
    bool plain = false;
    std::function<void(const std::string&)> tell = say;
    const StopFlag* stop = &interrupted; // when it becomes non-zero, a converter is ended: Interrupted
    double limit = 0;                                 // seconds that a converter may take; 0: 120 of CPU time
};

// A document that has no text, such as a PDF of scanned pages; and one whose converter is not installed.
struct NoText : Error {
    using Error::Error;
};
struct NoConverter : Error {
    using Error::Error;
};

// The text of a book, as valid UTF-8. bytes: the file's; of a document only the first five are used.
std::string book_text(const std::string& path, std::string_view bytes, const Reading& how);
std::string read_book(const std::string& path, const Reading& how);

} // namespace book
