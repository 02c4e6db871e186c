#include "book/pages.h"
#include "base/error.h"
#include "book/chunks.h"
#include "book/text.h"
#include "book/words.h"
#include <algorithm>
#include <climits>
#include <cstring>
#include <map>
#include <set>
#include <unordered_set>
#include <vector>

namespace book {

long page_number(std::string_view line) {
    if (line.size() > 80) return -1;
    std::string s(line);
    static const Strings frame = {" ", "\t", "-", "–", "—", "|", "*", "_", "[", "]", "(", ")", "<", ">", "!", "#"};
    for (bool more = true; more;) { // strips the signs around it
        more = false;
        for (auto& f : frame) {
            if (s.compare(0, f.size(), f) == 0) s.erase(0, f.size()), more = true;
            if (s.size() >= f.size() && s.compare(s.size() - f.size(), f.size(), f) == 0)
                s.erase(s.size() - f.size()), more = true;
        }
    }
    for (std::string word : {"page ", "Page ", "PAGE ", "p. ", "第 ", "第"})
        if (s.compare(0, word.size(), word) == 0) s.erase(0, s.find_first_not_of(' ', word.size()));
    const size_t digits = std::min(s.find_first_not_of("0123456789"), s.size());
    if (digits > 0 && digits <= 5) {
        const std::string rest = s.substr(digits);
        long all;
        int end = 0;
        const bool of_all = (sscanf(rest.c_str(), " of %5ld%n", &all, &end) == 1 ||
                             sscanf(rest.c_str(), " / %5ld%n", &all, &end) == 1) && (size_t)end == rest.size();
        return rest.empty() || of_all || rest == "页" || rest == " 页" ? strtol(s.c_str(), nullptr, 10) : -1;
    }
    long sum = 0, last = 0;
    for (char c : s) {
        static const std::map<char, long> ROMAN = {{'i', 1}, {'v', 5}, {'x', 10}, {'l', 50}, {'c', 100}};
        const auto letter = ROMAN.find(c);
        if (letter == ROMAN.end() || s.size() > 8) return -1;
        sum += letter->second - (last < letter->second ? 2 * last : 0), last = letter->second;
    }
    return sum > 0 ? sum : -1;
}

static bool ends_sentence(std::string_view text) {
    const std::u32string all = decode(trimmed(text));
    return all.empty() || std::u32string_view(U".!?:;。！？：；…”」』）)\"").find(all.back()) != std::u32string_view::npos;
}

// "第三章" and similar in Chinese; "Chapter 3".
static bool begins_chapter(std::string_view line) {
    std::u32string s = decode(trimmed(line).substr(0, 60));
    if (s.compare(0, 8, U"Chapter ") == 0 || s.compare(0, 8, U"CHAPTER ") == 0) return true;
    if (s.empty() || s[0] != U'第') return false;
    const size_t end = s.find_first_not_of(U"0123456789一二三四五六七八九十百零〇两 ", 1);
    return end != s.npos && end > 1 && std::u32string_view(U"章节節回卷部篇").find(s[end]) != std::u32string_view::npos;
}

// Numbers on lines of their own that start at 1 and never interrupt a sentence number chapters, not pages.
static bool are_chapters(const Lines& lines, const std::vector<size_t>& marks) {
    if (page_number(lines[marks[0]]) != 1) return false;
    return std::all_of(marks.begin(), marks.end(), [&](size_t mark) {
        size_t before = mark, after = mark + 1;
        while (before > 0 && is_blank_line(lines[before - 1])) before--;
        while (after < lines.size() && is_blank_line(lines[after])) after++;
        const bool goes_on = after < lines.size() && trimmed(lines[after])[0] >= 'a' && trimmed(lines[after])[0] <= 'z';
        return (before == 0 || ends_sentence(lines[before - 1]) || heading_level(lines[before - 1])) && !goes_on;
    });
}

// A line of a text column: some words, and no gap as between table cells.
static bool is_prose(std::u32string_view part) {
    while (!part.empty() && part.front() == ' ') part.remove_prefix(1);
    while (!part.empty() && part.back() == ' ') part.remove_suffix(1);
    const bool cjk = std::count_if(part.begin(), part.end(), [](char32_t c) { return is_cjk(c); }) > 9;
    const bool words = part.size() > 17 && std::count(part.begin(), part.end(), U' ') > 1;
    return (cjk || words) && part.find(U"   ") == part.npos;
}

bool in_columns(std::string_view page) {
    std::vector<std::u32string> lines;
    for (auto line : lines_of(page))
        if (!is_blank_line(line)) lines.push_back(decode(line));
    // A gutter: a column of blanks, two wide, that most lines keep free between two longer texts.
    size_t best = 0;
    for (size_t at = 20; at < 100; at++) {
        size_t both = 0, across = 0;
        for (auto& line : lines) {
            if (line.size() <= at + 1) continue;
            const std::u32string_view all = line;
            if (line[at] != ' ' || line[at + 1] != ' ') across++;
            else both += is_prose(all.substr(0, at)) && is_prose(all.substr(at));
        }
        if (across * 5 <= both) best = std::max(best, both);
    }
    return best >= 8 && best * 2 >= lines.size();
}

// Signs of pages in a text without form feeds (Markdown made of a PDF): numbers on lines of their own that count up, at
// least five, a page's length apart. Returns the lines of the longest such series.
static std::vector<size_t> page_marks(const Lines& lines) {
    std::vector<size_t> marks;
    size_t run = 0, best = 0, most = 0; // begin in marks of the current series, of the longest; its length
    bool fence = false;
    long last = 0;
    for (size_t i = 0; i < lines.size(); i++) {
        fence ^= FenceMark(lines[i]).mark != 0;
        auto blank = [&](size_t line) { return line >= lines.size() || is_blank_line(lines[line]); };
        if (fence || blank(i) || !blank(i - 1) || !blank(i + 1)) continue;
        const long number = page_number(lines[i]);
        if (number < 0) continue;
        if (number <= last || number > last + 2) run = marks.size(); // one page may lack its number
        marks.push_back(i), last = number;
        if (marks.size() - run > most) best = run, most = marks.size() - run;
    }
    if (most < 5) return {};
    marks = {marks.begin() + (ptrdiff_t)best, marks.begin() + (ptrdiff_t)(best + most)};
    if (are_chapters(lines, marks)) return {};
    const size_t between = (size_t)(lines[marks.back()].data() - lines[marks[0]].data()) / (most - 1);
    return between >= 200 && between <= 10000 ? marks : std::vector<size_t>();
}

// The lines of every page. Form feeds separate pages; without any, page numbers do.
static std::vector<Lines> pages_of(std::string_view book) {
    std::vector<Lines> pages;
    if (book.find('\f') != book.npos) {
        for (size_t at = 0, end; at <= book.size(); at = end + 1) {
            end = std::min(book.find('\f', at), book.size());
            pages.push_back(lines_of(book.substr(at, end - at)));
        }
        return pages;
    }
    const Lines lines = lines_of(book);
    size_t from = 0;
    for (size_t mark : page_marks(lines)) {
        pages.emplace_back(lines.begin() + (ptrdiff_t)from, lines.begin() + (ptrdiff_t)mark + 1);
        from = mark + 1;
    }
    pages.emplace_back(lines.begin() + (ptrdiff_t)from, lines.end());
    return pages;
}

// Clears page headers and footers. Among the first and last three lines of a page these are numbers that count with the
// pages (on two nearby pages), alone or beside a repeated text, and text repeated on three nearby pages. (A
// heading "Chapter 3" is neither: its number does not count with the pages.)
static void drop_heads(std::vector<Lines>& pages, CleanText& found) {
    constexpr size_t LONGEST = 90; // bytes; a longer line is a paragraph
    struct Place { size_t page, line; };
    std::map<std::string, std::vector<Place>> places; // by the common part of such lines
    auto note = [&](char edge, std::string_view text, long number, Place at) {
        places[format("%c%ld ", edge, number) + std::string(text)].push_back(at);
    };
    for (size_t p = 0; p < pages.size(); p++) {
        std::vector<size_t> filled;
        for (size_t i = 0; i < pages[p].size(); i++)
            if (!is_blank_line(pages[p][i])) filled.push_back(i);
        for (size_t k = 0; k < filled.size(); k++) {
            const bool top = k < 3, bottom = k + 3 >= filled.size();
            if (!top && !bottom) continue;
            std::string line; // with single blanks
            for (char c : trimmed(pages[p][filled[k]]))
                if ((uint8_t)c > ' ') line += c;
                else if (line.empty() || line.back() != ' ') line += ' ';
            if (line.size() > LONGEST) continue;
            const size_t front = line.find_first_not_of("0123456789"), back = line.find_last_not_of("0123456789") + 1;
            for (char edge : {top ? 't' : 'b', top && bottom ? 'b' : ' '}) {
                if (edge == ' ') continue;
                const Place at = {p, filled[k]};
                if (const long n = page_number(line); n >= 0) note(edge, "", n - (long)p, at);
                else note(edge, line, LONG_MAX, at);
                if (front == line.npos || heading_level(line)) continue;
                auto tell = [&](const std::string& number, const std::string& rest) {
                    const bool fits = !number.empty() && number.size() < 6 && rest != trimmed(rest);
                    if (fits) note(edge, trimmed(rest), strtol(number.c_str(), nullptr, 10) - (long)p, at);
                };
                tell(line.substr(0, front), line.substr(front));
                tell(line.substr(back), line.substr(0, back));
            }
        }
    }
    std::set<std::pair<size_t, size_t>> gone;
    for (auto& [key, list] : places) {
        const std::string_view text = std::string_view(key).substr(key.find(' ') + 1);
        const auto is_letter = [](char c) { return is_latin((uint8_t)c) || (uint8_t)c >= 0x80; };
        const bool rule = text.size() >= 3 && text.find_first_not_of("-_*=") == text.npos;
        const auto letters = std::count_if(text.begin(), text.end(), is_letter);
        if (!text.empty() && !rule && letters < 3) continue; // a brace of code
        const bool numbered = key.compare(1, text.data() - key.data() - 2, std::to_string(LONG_MAX)) != 0;
        const size_t least = numbered ? 2 : 3;
        for (size_t i = 0, j; i < list.size(); i = j) {
            size_t on = 1; // number of pages, each at most two after the previous one
            for (j = i + 1; j < list.size() && list[j].page <= list[j - 1].page + 2; j++)
                on += list[j].page != list[j - 1].page;
            if (on < least) continue;
            for (size_t k = i; k < j; k++) {
                if (!gone.insert({list[k].page, list[k].line}).second) continue;
                (text.empty() ? found.numbers : found.heads)++;
                pages[list[k].page][list[k].line] = "";
            }
        }
    }
}

// Joins the pages. If a page ends within a sentence, the next one continues it.
static std::string join_pages(const std::vector<Lines>& pages) {
    std::string all;
    for (auto& page : pages) {
        std::string text;
        for (auto line : page) text.append(line) += '\n';
        const size_t first = text.find_first_not_of(" \t\n");
        if (first == text.npos) continue;
        text.erase(0, text.rfind('\n', first) + 1); // (npos + 1 is 0)
        text.erase(text.find_last_not_of(" \t\n") + 1);
        const char last = all.empty() ? '.' : all.back(), next = text[text.find_first_not_of(" \t")];
        const bool goes_on = (next >= 'a' && next <= 'z') || ((last & 0x80) && (next & 0x80));
        const bool ends = ends_sentence(std::string_view(all).substr(all.rfind('\n') + 1)) || begins_chapter(text);
        all += all.empty() ? "" : goes_on && !ends ? "\n" : "\n\n";
        all += text;
    }
    return all + "\n";
}

namespace {

// Rejoins words hyphenated at a line's end, on the first of the two lines. The hyphen stays if the book writes the word
// with it elsewhere and never without.
struct HyphenJoiner {
    std::unordered_set<uint64_t> words, pairs; // of the text: its words, and its hyphenated pairs of words

    explicit HyphenJoiner(std::u32string_view text) {
        size_t from = 0, to = 0; // the previous word
        for_each_word(text, [&](size_t i, size_t j) {
            words.insert(word_hash(text.substr(i, j - i)));
            if (i == to + 1 && text[to] == '-') pairs.insert(pair(text.substr(from, to - from), text.substr(i, j - i)));
            from = i, to = j;
        });
    }
    static uint64_t pair(std::u32string_view a, std::u32string_view b) { return mix(word_hash(a), word_hash(b)); }
    static bool is_letter(uint32_t c) { return is_word(c) && !is_digit(c); }

    // If a line ends within a word and the next line begins with the rest of it, moves this rest to the first.
    bool join(std::string& line, std::string& next) const {
        constexpr size_t LONGEST = 80; // bytes of half a word
        const std::string_view more = trimmed(next);
        const size_t tail = next_character(line, line.size() - std::min(line.size(), LONGEST));
        std::u32string left = decode(std::string_view(line).substr(tail));
        const std::u32string right = decode(more.substr(0, next_character(more, std::min(more.size(), LONGEST))));
        const char32_t hyphen = left.empty() ? 0 : left.back();
        if (hyphen != '-' && hyphen != 0x2010 && hyphen != 0xAD) return false;
        left.pop_back();
        size_t from = left.size(), to = 0;
        while (from > 0 && is_letter(left[from - 1])) from--;
        while (to < right.size() && is_letter(right[to])) to++;
        const bool digits = !left.empty() && is_digit(left.back()) && !right.empty() && is_digit(right[0]);
        if (hyphen == '-' && digits && left.find(U' ') != left.npos) return take(line, next, more), true; // "of 15-", "20%": a range
        if (from == left.size() || to == 0 || (right[0] < 0x80 && right[0] < 'a')) return false;
        left.erase(0, from);
        const std::u32string rest = right.substr(0, to);
        if (std::any_of(left.begin() + 1, left.end(), [](uint32_t c) { return c >= 'A' && c <= 'Z'; })) return false;
        const bool with = pairs.count(pair(left, rest)) && !words.count(word_hash(left + rest));
        const size_t bytes = hyphen == '-' ? 1 : hyphen == 0xAD ? 2 : 3;
        if (hyphen == 0xAD || (left.size() > 1 && !with)) line.erase(line.size() - bytes);
        return take(line, next, more), true;
    }
    // Moves the first word of the next line to the end of this one.
    static void take(std::string& line, std::string& next, std::string_view more) {
        const size_t end = std::min(more.find_first_of(" \t"), more.size());
        line += more.substr(0, end);
        const std::string after(trimmed(more.substr(end)));
        next = after.empty() ? "" : next.substr(0, (size_t)(more.data() - next.data())) + after;
    }
};

} // namespace

bool was_pdf(std::string_view book) {
    return book.find('\f') != book.npos || !page_marks(lines_of(book)).empty();
}

CleanText clean_pages(std::string_view book) {
    CleanText clean;
    std::vector<Lines> pages = pages_of(book);
    clean.breaks = pages.size() - 1;
    drop_heads(pages, clean);
    const std::string all = join_pages(pages);
    const HyphenJoiner joiner(decode(all));
    Strings lines;
    bool fence = false;
    for (auto view : lines_of(all)) {
        fence ^= FenceMark(view).mark != 0;
        std::string line(view);
        while (!fence && !lines.empty() && joiner.join(lines.back(), line)) clean.hyphens++;
        if (!line.empty() || view.empty()) lines.push_back(line);
    }
    static const char* const LIGATURES[] = {"ff", "fi", "fl", "ffi", "ffl", "st", "st"}; // U+FB00 .. U+FB06
    for (auto& line : lines) {
        for (size_t at = 0; (at = line.find("\xEF\xAC", at)) != line.npos; at++)
            if (const int which = (uint8_t)line[at + 2] - 0x80; which <= 6) line.replace(at, 3, LIGATURES[which]);
        clean.text += line + "\n";
    }
    return clean;
}

} // namespace book
