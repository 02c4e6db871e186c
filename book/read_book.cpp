#include "book/read_book.h"
#include "base/file.h"
#include "base/json_lines.h"
#include "book/characters.h"
#include "book/pages.h"
#include "book/report.h"
#include "book/text.h"
#include "model/utf8.h"
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

namespace book {

// A document may be made to take a converter's whole machine: it has 120 s of CPU time and 1 GB for what it writes;
// pdftotext also 4 GB of memory (pandoc reserves address space without end; see pandoc_limits). It ends with the thread
// that started it.
static void limit_converter(const char* program) {
    const auto most = [](auto of, rlim_t value) {
        const rlimit both = {value, value};
        setrlimit(of, &both);
    };
    most(RLIMIT_CPU, 120), most(RLIMIT_FSIZE, 1 << 30), most(RLIMIT_CORE, 0);
    if (strcmp(program, "pdftotext") == 0) most(RLIMIT_AS, (rlim_t)4 << 30);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
}

// Runs a program of PATH and returns its standard output. False if it is not installed; if it fails, the last line of
// its messages is in the error. No shell parses the words.
static bool output_of(const std::string& path, const Strings& command, const Reading& how, std::string& out) {
    using File = std::unique_ptr<FILE, int (*)(FILE*)>;
    const File text(tmpfile(), fclose), said(tmpfile(), fclose);
    int started[2]; // the child's end closes on exec, or sends errno
    if (!text || !said || pipe2(started, O_CLOEXEC) != 0) DIE("a temporary file: %s", strerror(errno));
    std::vector<char*> argv;
    for (auto& word : command) argv.push_back((char*)word.c_str());
    argv.push_back(nullptr);
    const pid_t child = fork();
    if (child < 0) DIE("%s: %s", argv[0], strerror(errno));
    if (child == 0) {
        signal(SIGPIPE, SIG_DFL);
        limit_converter(argv[0]);
        dup2(open("/dev/null", O_RDONLY), 0), dup2(fileno(text.get()), 1), dup2(fileno(said.get()), 2);
        execvp(argv[0], argv.data());
        const int fault = errno;
        _exit(write(started[1], &fault, sizeof fault) == sizeof fault ? 127 : 126);
    }
    close(started[1]);
    int fault = 0, status = 0;
    while (read(started[0], &fault, sizeof fault) < 0 && errno == EINTR) {}
    close(started[0]);
    const double start = seconds();
    bool late = false;
    while (waitpid(child, &status, WNOHANG) == 0) { // (a signal may have reached another thread)
        late = how.limit > 0 && seconds() - start > how.limit;
        if (*how.stop || late) kill(child, SIGKILL);
        usleep(2000);
    }
    if (*how.stop) throw Interrupted{};
    if (late) DIE("%s: %s took longer than %.0f s", path.c_str(), argv[0], how.limit);
    if (fault == ENOENT) return false;
    if (fault) DIE("%s: %s", argv[0], strerror(fault));
    auto all_of = [&](FILE* file) {
        struct stat st;
        if (fstat(fileno(file), &st) != 0) DIE("%s: %s", argv[0], strerror(errno));
        std::string s((size_t)st.st_size, '\0');
        if (pread(fileno(file), s.data(), s.size(), 0) != (ssize_t)s.size()) DIE("%s: %s", argv[0], strerror(errno));
        return s;
    };
    if (status != 0) {
        const std::string all(trimmed(all_of(said.get())));
        std::string why = all.empty() ? "" : ": " + all.substr(all.rfind('\n') + 1, 200);
        for (char& c : why)
            if ((uint8_t)c < 0x20 || c == 0x7F) c = ' ';
        if (WIFEXITED(status))
            DIE("%s: %s failed: exit status %d%s", path.c_str(), argv[0], WEXITSTATUS(status), why.c_str());
        DIE("%s: %s was ended by signal %d%s", path.c_str(), argv[0], WTERMSIG(status), why.c_str());
    }
    out = all_of(text.get());
    return true;
}

// A PDF's pages. Pages with columns are in pdftotext's reading order; the others keep their layout, so that tables stay
// whole.
static std::string read_pdf(const std::string& path, const std::string& word, const std::string& stem,
                            const Reading& how) {
    std::string text, ordered;
    if (!output_of(path, {"pdftotext", "-layout", "-enc", "UTF-8", word, "-"}, how, text))
        throw NoConverter(format("%s: a PDF, and there is no pdftotext (install poppler-utils); elsewhere: pdftotext "
                                 "-layout %s %s.txt", path.c_str(), path.c_str(), stem.c_str()));
    auto pages_of = [](const std::string& all) {
        Strings pages(1);
        for (char c : all)
            if (c == '\f') pages.emplace_back();
            else pages.back() += c;
        return pages;
    };
    Strings pages = pages_of(text);
    if (std::none_of(pages.begin(), pages.end(), in_columns)) return text;
    output_of(path, {"pdftotext", "-enc", "UTF-8", word, "-"}, how, ordered);
    const Strings others = pages_of(ordered);
    std::string all;
    size_t turned = 0;
    for (size_t i = 0; i < pages.size(); i++) {
        const bool columns = i < others.size() && in_columns(pages[i]);
        turned += columns;
        all += (i ? "\f" : "") + (columns ? others[i] : pages[i]);
    }
    how.tell(format("%s: %zu of %zu pages are in columns, which are read one after another", path.c_str(), turned,
                    pages.size() - (pages.back().empty() && pages.size() > 1)));
    return all;
}

// Words that limit this pandoc, asked once: a heap of 2 GB, and --sandbox (from 2.15 on), with which it loads nothing
// that a book names. False: there is no pandoc.
static bool pandoc_limits(const std::string& path, const Reading& how, Strings& limits) {
    static std::mutex mutex;
    static std::optional<Strings> known;
    std::lock_guard lock(mutex);
    if (!known) {
        Strings heap = {"+RTS", "-M2G", "-RTS"};
        std::string help;
        try {
            if (!output_of(path, {"pandoc", "--help", "+RTS", "-M2G", "-RTS"}, how, help)) return false;
        } catch (const Error&) { // built without such options
            heap.clear();
            if (!output_of(path, {"pandoc", "--help"}, how, help)) return false;
        }
        if (help.find("--sandbox") != help.npos) heap.insert(heap.begin(), "--sandbox");
        known = heap;
    }
    limits = *known;
    return true;
}

// Formats that pandoc converts to Markdown.
static std::string read_document(const std::string& path, const std::string& word, const std::string& stem,
                                 const Reading& how) {
    std::string text;
    Strings command = {"pandoc", "-t", how.plain ? "plain" : "gfm-raw_html", "--wrap=none", "--lua-filter", how.filter,
                       word}, limits;
    const bool there = pandoc_limits(path, how, limits);
    command.insert(command.end(), limits.begin(), limits.end());
    if (!there || !output_of(path, command, how, text))
        throw NoConverter(format("%s: no Markdown, and there is no pandoc (install pandoc); elsewhere: pandoc -t %s %s "
                                 "-o %s.%s", path.c_str(), how.plain ? "plain" : "gfm", path.c_str(), stem.c_str(),
                                 how.plain ? "txt" : "md"));
    return text;
}

static void need_text(const std::string& path, const std::string& text) {
    for (const std::string begin : {"PK\3\4", "\xD0\xCF\x11\xE0", "{\\rtf"})
        if (text.compare(0, begin.size(), begin) == 0)
            DIE("%s: a document of an office program; save it as .docx, .odt, .epub or .html", path.c_str());
    must_be_text(path, text);
}

static size_t dot_of(const std::string& path) {
    const size_t dot = path.find('.', path.rfind('/') + 1);
    return dot == path.npos ? path.size() : path.rfind('.');
}
static std::string ending_of(const std::string& path) {
    std::string ending = path.substr(dot_of(path));
    for (char& c : ending) c = (char)lower((uint8_t)c);
    return ending;
}
static bool is_pdf(const std::string& path, std::string_view bytes) {
    return ending_of(path) == ".pdf" || bytes.substr(0, 5) == "%PDF-";
}
bool is_document(const std::string& path, std::string_view bytes) {
    static const std::set<std::string> BY_PANDOC = {".html", ".htm", ".xhtml", ".docx", ".odt", ".epub"};
    return is_pdf(path, bytes) || BY_PANDOC.count(ending_of(path));
}

std::string book_text(const std::string& path, std::string_view bytes, const Reading& how) {
    const std::string stem = path.substr(0, dot_of(path));
    const std::string word = path[0] == '/' ? path : "./" + path; // no option and no URL
    const bool document = is_document(path, bytes), pdf = is_pdf(path, bytes);
    std::string text = pdf        ? read_pdf(path, word, stem, how)
                       : document ? read_document(path, word, stem, how)
                                  : std::string(bytes);
    need_text(path, text);
    if (text.compare(0, 3, "\xEF\xBB\xBF") == 0) text.erase(0, 3);
    if (document && text.find_first_not_of(" \t\r\n\f") == text.npos)
        throw NoText(path + ": no text in it" + (pdf ? "; pictures of pages need OCR first" : ""));
    if (how.clean == "no" || (how.clean == "auto" && !pdf && !was_pdf(text))) return text;
    const CleanText c = clean_pages(text);
    how.tell(format("%s: cleaned as text of a PDF: %zu page breaks, %zu page numbers, %zu running heads and feet, "
                    "%zu hyphens at line ends (--clean no leaves all)",
                    path.c_str(), c.breaks, c.numbers, c.heads, c.hyphens));
    return c.text;
}

std::string read_book(const std::string& path, const Reading& how) {
    const MappedFile file(path);
    return book_text(path, file.text(), how);
}

} // namespace book
