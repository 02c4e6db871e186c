#include "book/chunks.h"
#include "book/markdown.h"
#include "model/utf8.h"
#include <algorithm>

namespace {

// A book is cut into pieces: headings, code fences, paragraphs with the blank lines after them. A paragraph that is too
// long is cut into its sentences, and a sentence that is too long anywhere. Pieces follow each other without a gap, and
// so do the chunks made of them: every character of the book is in some chunk, whatever the Markdown.
struct BookPiece {
    static constexpr auto TEXT = MarkdownBlock::TEXT, FENCE = MarkdownBlock::FENCE, HEADING = MarkdownBlock::HEADING;
    MarkdownBlock::Kind kind;
    size_t begin, end, size; // bytes of the book; size in characters or tokens
    int level = 0;           // of a heading
    size_t titles = 1;       // lines of its title
    size_t skip = 0;         // bytes before the book's first piece
};

} // namespace

// ---- Titles and sentences

static std::string heading_title(std::string_view piece, size_t lines, size_t longest) {
    size_t end = 0;
    while (lines--) end = std::min(piece.find('\n', end), piece.size() - 1) + 1;
    std::string_view line = piece.substr(0, end);
    if (heading_level(line)) {
        line = line.substr(std::min(line.find_first_not_of(" \t#"), line.size()));
        line = line.substr(0, line.find_last_not_of(" \t\r\n#") + 1);
    }
    std::string title;
    for (char32_t c : decode(line.substr(0, line.find_last_not_of(" \t\r\n") + 1)))
        if (longest && longest--) utf8_append(title, is_space(c) ? ' ' : c); // any blank becomes ' ', for one line
    return title.substr(0, title.find_last_not_of(' ') + 1);
}

std::vector<size_t> sentence_ends(std::string_view text) {
    std::vector<size_t> ends;
    const char *begin = text.data(), *end = begin + text.size();
    auto any_of = [](uint32_t c, std::u32string_view set) { return set.find((char32_t)c) != set.npos; };
    for (const char* p = begin; p < end;) {
        const uint32_t c = utf8_read(p);
        bool ends_here = c == '\n' || any_of(c, U"。！？；…");
        const bool western = c == '.' || c == '!' || c == '?';
        if (c != '\n' && (ends_here || western)) {
            for (const char* q = p; q < end && any_of(utf8_read(q), U"。！？.!?…\"'”’」』）)】》");) p = q;
            if (western) ends_here = p < end && (*p == ' ' || *p == '\t' || *p == '\n' || *p == '\r');
            while (ends_here && p < end && (*p == ' ' || *p == '\t')) p++;
        }
        if (ends_here && p < end) ends.push_back((size_t)(p - begin));
    }
    if (!text.empty()) ends.push_back(text.size());
    return ends;
}

// ---- Pieces

// A text without a place to cut it: halved until the parts fit.
static void add_halves(std::vector<BookPiece>& out, std::string_view book, size_t begin, size_t end,
                       const ChunkSizes& sizes) {
    const size_t size = sizes.measure(book.substr(begin, end - begin));
    const size_t middle = next_character(book, begin + (end - begin) / 2);
    if (size <= sizes.most || middle >= end) return out.push_back({BookPiece::TEXT, begin, end, size});
    add_halves(out, book, begin, middle, sizes);
    add_halves(out, book, middle, end, sizes);
}

// Adds a piece; if it is too long and no fence, its sentences.
static void add_text(std::vector<BookPiece>& pieces, std::string_view book, BookPiece piece, const ChunkSizes& sizes) {
    const std::string_view text = book.substr(piece.begin, piece.end - piece.begin);
    piece.size = sizes.measure(text);
    if (piece.kind == BookPiece::FENCE || piece.size <= sizes.most) return pieces.push_back(piece);
    const size_t first = pieces.size();
    size_t begin = 0;
    for (size_t end : sentence_ends(text)) {
        add_halves(pieces, book, piece.begin + begin, piece.begin + end, sizes);
        begin = end;
    }
    pieces[first].kind = piece.kind, pieces[first].level = piece.level; // an endless heading: its beginning
    pieces[first].titles = piece.titles, pieces[first].skip = piece.skip;
}

static std::vector<BookPiece> cut_pieces(std::string_view book, const ChunkSizes& sizes) {
    std::vector<std::string_view> lines;
    for (size_t at = 0; at < book.size(); at += lines.back().size())
        lines.push_back(book.substr(at, std::min(book.find('\n', at), book.size() - 1) + 1 - at));
    const std::vector<MarkdownBlock> blocks = markdown_blocks(lines);
    std::vector<BookPiece> pieces;
    auto place = [&](size_t block) { return (size_t)(lines[blocks[block].line].data() - book.data()); };
    auto begin_of = [&](size_t block) { // the first piece includes all before the first block, the last one all behind
        return block == 0 ? 0 : block < blocks.size() ? place(block) : book.size();
    };
    if (blocks.empty() && !book.empty()) add_text(pieces, book, {BookPiece::TEXT, 0, book.size(), 0}, sizes);
    for (size_t i = 0; i < blocks.size(); i++) {
        BookPiece piece = {blocks[i].kind, begin_of(i), begin_of(i + 1), 0, blocks[i].level, blocks[i].titles};
        piece.skip = place(i) - piece.begin;
        add_text(pieces, book, piece, sizes);
    }
    return pieces;
}

// ---- Chunks

// Where the repeated end of the text start..end begins: at the first sentence among its last characters; if none
// begins there, at the first of these characters.
static size_t overlap_begin(std::string_view book, size_t start, size_t end, size_t characters) {
    size_t low = end;
    for (; characters > 0 && low > start; characters--) {
        low--;
        while (((uint8_t)book[low] & 0xC0) == 0x80) low--;
    }
    size_t sentence = start;
    for (size_t behind : sentence_ends(book.substr(start, end - start)))
        if (sentence < low) sentence = start + behind;
    return sentence < end ? sentence : low;
}

std::vector<Chunk> cut_chunks(std::string_view book, const ChunkSizes& sizes) {
    const std::vector<BookPiece> pieces = cut_pieces(book, sizes);
    std::vector<Chunk> chunks;
    std::vector<std::string> path; // titles above the current place, one per level
    auto enter = [&](const BookPiece& heading) {
        path.resize((size_t)heading.level - 1);
        const size_t begin = heading.begin + heading.skip;
        path.push_back(heading_title(book.substr(begin, heading.end - begin), heading.titles, sizes.title));
    };
    for (size_t first = 0, last; first < pieces.size(); first = last) {
        size_t size = pieces[first].size;
        for (last = first + 1; last < pieces.size(); last++) {
            const BookPiece& p = pieces[last];
            if (p.kind == BookPiece::HEADING && (p.level == 1 || size >= sizes.least)) break;
            if (size + p.size > sizes.most) {
                size_t back = last; // headings belong to the text below them
                while (back > first && pieces[back - 1].kind == BookPiece::HEADING) back--;
                if (back > first) last = back;
                break;
            }
            size += p.size;
        }
        Chunk chunk = {pieces[first].begin, pieces[first].begin, pieces[last - 1].end, ""};
        if (first > 0 && pieces[first].kind == BookPiece::TEXT) {
            size_t from = first; // the text right before it in its chunk, after the last heading or code
            while (pieces[from].begin > chunks.back().body && pieces[from - 1].kind == BookPiece::TEXT) from--;
            chunk.begin = overlap_begin(book, pieces[from].begin, chunk.body, sizes.overlap);
        }
        size_t i = first;
        for (; i < last && pieces[i].kind == BookPiece::HEADING; i++) enter(pieces[i]);
        for (auto& title : path)
            if (!title.empty()) chunk.chapter += (chunk.chapter.empty() ? "" : " > ") + title;
        for (; i < last; i++)
            if (pieces[i].kind == BookPiece::HEADING) enter(pieces[i]);
        chunks.push_back(chunk);
    }
    return chunks;
}
