// book/chunks.h: cuts a book in Markdown or plain text into chunks, at headings, paragraphs and sentences.
// `datagen chunk` makes training data of the chunks, search/ the passages it finds.
//
//   ChunkSizes sizes = {3500, 2450, 200, 120};
//   for (const Chunk& c : cut_chunks(book, sizes)) ... book.substr(c.begin, c.end - c.begin) ... c.chapter
//
// The text is valid UTF-8. Memory: about 40 bytes per line of it.
#pragma once
#include "book/characters.h"
#include "book/markdown.h"
#include <functional>
#include <string>
#include <string_view>
#include <vector>

struct Chunk {
    size_t begin, body, end; // begin..body repeats the end of the previous chunk
    std::string chapter;     // "2 Threads > 2.1 Warps": the headings above its body
};
struct ChunkSizes {
    size_t most, least, overlap, title; // least: a chunk this long ends at the next heading
    std::function<size_t(std::string_view)> measure = count_characters;
};

// Every character of the book is in some chunk, whatever the Markdown.
std::vector<Chunk> cut_chunks(std::string_view book, const ChunkSizes& sizes);

// Where the sentences of a text end: at a line's end, or after . ! ? and the like with the closing signs behind them.
std::vector<size_t> sentence_ends(std::string_view text);
