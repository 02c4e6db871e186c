// Fuzzes the Markdown chunker: whatever the book, every character of it is in some chunk, once in a body; chunks begin
// and end between characters; only a code fence makes a body longer than asked; sentences are cut without a gap. What was
// on pages is still text when it is cleaned.
#include "book/characters.h"
#include "book/chunks.h"
#include "book/pages.h"
#include "model/utf8.h"
#include <cstdint>
#include <cstdlib>
#include <string>

using namespace book;

static void require(bool holds) { if (!holds) abort(); }

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size < 2) return 0;
    const size_t most = 8 + data[0], overlap = data[1];
    std::string book;
    utf8_repair(book, {(const char*)data + 2, size - 2}, true);

    size_t at = 0;
    for (const size_t end : sentence_ends(book)) {
        require(end > at && end <= book.size() && next_character(book, end) == end);
        at = end;
    }
    require(at == book.size());

    std::string again;
    const CleanText clean = clean_pages(book); // as if it had been a PDF: what is left is text
    utf8_repair(again, clean.text, true);
    require(again == clean.text && clean.text.find('\f') == clean.text.npos);

    const ChunkSizes sizes = {most, most * 7 / 10, overlap, 20};
    const auto chunks = cut_chunks(book, sizes);
    at = 0;
    for (auto& c : chunks) {
        require(c.begin <= c.body && c.body == at && c.body < c.end && c.end <= book.size());
        require(next_character(book, c.begin) == c.begin && next_character(book, c.end) == c.end);
        const std::string_view body = std::string_view(book).substr(c.body, c.end - c.body);
        require(count_characters(std::string_view(book).substr(c.begin, c.body - c.begin)) <= overlap);
        if (count_characters(body) > most) require(body.find("```") != body.npos || body.find("~~~") != body.npos);
        require(c.chapter.find('\n') == std::string::npos);
        at = c.end;
    }
    require(at == book.size());
    return 0;
}
