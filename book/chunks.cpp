#include "book/chunks.h"
#include "model/utf8.h"
#include <algorithm>
#include <array>
#include <cstring>

namespace {

// A book is cut into pieces: headings, code fences, paragraphs with the blank lines after them; a paragraph that is
// too long into its sentences, and a sentence that is too long where it must be. Pieces follow each other without a
// gap, and so do the chunks made of them: every character of the book is in some chunk, whatever the Markdown.
struct BookPiece {
    enum Kind { TEXT, FENCE, HEADING } kind;
    size_t begin, end, size; // bytes of the book; size in characters or tokens
    int level = 0;           // of a heading
};

} // namespace

// ---- Lines

FenceMark::FenceMark(std::string_view line) {
    const size_t first = line.find_first_not_of(" \t");
    if (first == line.npos || (line[first] != '`' && line[first] != '~')) return;
    const size_t end = std::min(line.find_first_not_of(line[first], first), line.size());
    if (end - first < 3 || (line[first] == '`' && line.find('`', end) != line.npos)) return;
    mark = line[first], count = end - first;
    bare = line.find_first_not_of(" \t\r\n", end) == line.npos;
}

int heading_level(std::string_view line) {
    size_t first = std::min(line.find_first_not_of(' '), line.size()), n = first;
    while (n < line.size() && line[n] == '#') n++;
    const bool heading = first < 4 && n > first && n - first <= 6 && (n == line.size() || strchr(" \t\r\n", line[n]));
    return heading ? (int)(n - first) : 0;
}

// A line of = or - under a title: 1 or 2, else 0.
static int underline_level(std::string_view line) {
    line = line.substr(0, line.find_last_not_of(" \t\r\n") + 1);
    if (line.size() < 3 || (line[0] != '=' && line[0] != '-')) return 0;
    return line.find_first_not_of(line[0]) != line.npos ? 0 : line[0] == '=' ? 1 : 2;
}

static std::string heading_title(std::string_view piece, size_t longest) {
    std::string_view line = piece.substr(0, piece.find('\n'));
    if (heading_level(line)) {
        line = line.substr(std::min(line.find_first_not_of(" #"), line.size()));
        line = line.substr(0, line.find_last_not_of(" \t\r#") + 1);
    }
    std::string title;
    for (char32_t c : decode(line))
        if (longest && longest--) utf8_append(title, is_space(c) ? ' ' : c); // blanks of a kind, so that it is one line
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

// A text without a place to cut it: halves, until they fit.
static void add_halves(std::vector<BookPiece>& out, std::string_view book, size_t begin, size_t end,
                       const ChunkSizes& sizes) {
    const size_t size = sizes.measure(book.substr(begin, end - begin));
    const size_t middle = next_character(book, begin + (end - begin) / 2);
    if (size <= sizes.most || middle >= end) return out.push_back({BookPiece::TEXT, begin, end, size});
    add_halves(out, book, begin, middle, sizes);
    add_halves(out, book, middle, end, sizes);
}

static std::vector<BookPiece> cut_pieces(std::string_view book, const ChunkSizes& sizes) {
    std::vector<std::string_view> lines;
    for (size_t at = 0; at < book.size(); at += lines.back().size())
        lines.push_back(book.substr(at, std::min(book.find('\n', at), book.size() - 1) + 1 - at));
    const size_t n = lines.size();
    // closer[i]: the longest runs of ` and of ~ that could close a fence from line i on. A fence that nothing closes
    // is no fence: one stray mark must not turn the rest of a book into code.
    std::vector<std::array<size_t, 2>> closer(n + 1);
    for (size_t i = n; i-- > 0;) {
        const FenceMark f(lines[i]);
        closer[i] = closer[i + 1];
        if (f.bare) closer[i][f.mark == '~'] = std::max(closer[i][f.mark == '~'], f.count);
    }
    auto opens_fence = [&](size_t i) {
        const FenceMark f(lines[i]);
        return f.mark && closer[i + 1][f.mark == '~'] >= f.count;
    };
    std::vector<BookPiece> pieces;
    for (size_t i = 0, next, at = 0; i < n; i = next) {
        BookPiece piece = {BookPiece::TEXT, at, 0, 0};
        next = i + 1;
        if (opens_fence(i)) {
            piece.kind = BookPiece::FENCE;
            const FenceMark open(lines[i]);
            for (;; next++)
                if (const FenceMark f(lines[next]); f.bare && f.mark == open.mark && f.count >= open.count) break;
            next++;
        } else if (int level = heading_level(lines[i])) {
            piece.kind = BookPiece::HEADING, piece.level = level;
        } else if (int level = next < n && !is_blank_line(lines[i]) ? underline_level(lines[next]) : 0) {
            piece.kind = BookPiece::HEADING, piece.level = level;
            next++;
        } else {
            while (next < n && !is_blank_line(lines[next]) && !opens_fence(next) && !heading_level(lines[next])) next++;
        }
        while (next < n && is_blank_line(lines[next])) next++;
        const char* end = next < n ? lines[next].data() : book.data() + book.size();
        piece.end = at = (size_t)(end - book.data());
        const std::string_view text = book.substr(piece.begin, piece.end - piece.begin);
        piece.size = sizes.measure(text);
        if (piece.kind == BookPiece::FENCE || piece.size <= sizes.most) {
            pieces.push_back(piece);
            continue;
        }
        const size_t first = pieces.size();
        size_t begin = 0;
        for (size_t end : sentence_ends(text)) {
            add_halves(pieces, book, piece.begin + begin, piece.begin + end, sizes);
            begin = end;
        }
        pieces[first].kind = piece.kind, pieces[first].level = piece.level; // of a heading without end, its beginning
    }
    return pieces;
}

// ---- Chunks

// Where the repeated end of the text start..end begins: at the first sentence among its last characters, or, if none
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
    std::vector<std::string> path; // titles above the place we are at, one a level
    auto enter = [&](const BookPiece& heading) {
        path.resize((size_t)heading.level - 1);
        path.push_back(heading_title(book.substr(heading.begin, heading.end - heading.begin), sizes.title));
    };
    for (size_t first = 0, last; first < pieces.size(); first = last) {
        size_t size = pieces[first].size;
        for (last = first + 1; last < pieces.size(); last++) {
            const BookPiece& p = pieces[last];
            if (p.kind == BookPiece::HEADING && (p.level == 1 || size >= sizes.least)) break;
            if (size + p.size > sizes.most) {
                size_t back = last; // headings go with what they stand above
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
