// convert.cpp: a temporary file, its text, and refusals that do not tell where it lay.
#include "server/api/convert.h"
#include "base/error.h"
#include "base/file.h"
#include "base/stop_flag.h"
#include "base/temporary.h"
#include "base/text.h"
#include "book/arguments.h"
#include "book/read_book.h"
#include "server/api/limits.h"
#include "server/api/refusal.h"
#include "sj.h"
#include <algorithm>
#include <cctype>
#include <memory>

namespace server {

// The name of its temporary file: pandoc chooses the format by the ending.
static std::string file_for(const std::string& name, std::string_view bytes) {
    if (bytes.substr(0, 5) == "%PDF-") return "document.pdf";
    std::string ending = name.substr(std::min(name.rfind('.'), name.size()));
    for (char& c : ending) c = (char)tolower((unsigned char)c);
    const std::string file = "document" + ending;
    auto is_plain = [](char c) { return isalnum((unsigned char)c) || c == '.'; };
    const bool plain = std::all_of(ending.begin(), ending.end(), is_plain);
    if (!plain || !book::is_document(file, ""))
        throw Refusal(415, name + ": PDF, DOCX, ODT, EPUB and HTML are converted, and nothing else", "name");
    return file;
}

// A message that names the document, not the temporary file.
static std::string renamed(std::string message, const std::string& file, const std::string& name) {
    auto replace = [&](const std::string& what, const std::string& by) {
        for (size_t at = 0; (at = message.find(what, at)) != message.npos; at += by.size())
            message.replace(at, what.size(), by);
    };
    auto stem = [](const std::string& path) { return path.substr(0, path.rfind('.')); };
    replace(file, name), replace(stem(file), stem(name));
    return message;
}

std::string converted_document(const std::string& name, std::string_view bytes, const StopFlag* stop, double limit) {
    if (name.empty() || name.size() > MAX_NAME || name.find('\0') != name.npos)
        throw Refusal(400, format("name must have 1 to %zu bytes", MAX_NAME), "name");
    if (invalid_utf8(name) != name.npos) throw Refusal(400, "name: invalid UTF-8", "name");
    if (bytes.empty()) throw Refusal(400, name + ": it is empty");
    book::Reading how = {"auto", "", false, [](auto&) {}, stop, limit};
    const std::string temporary = file_for(name, bytes);
    std::unique_ptr<TemporaryFolder> folder;
    std::string file, text;
    try {
        how.filter = book::Arguments::beside_program("data/datagen/book.lua");
        folder = std::make_unique<TemporaryFolder>();
        file = folder->path + "/" + temporary;
        write_text(file, bytes);
    } catch (const Error& e) { // not the request's fault; the client must not see the path
        print_error("serve", e.what());
        throw Refusal(500, "this server cannot convert documents now");
    }
    try {
        text = book::book_text(file, bytes, how);
    } catch (const book::Interrupted&) {
        throw Refusal(503, "the client has gone");
    } catch (const book::NoConverter& e) {
        throw Refusal(501, renamed(e.what(), file, name), "name");
    } catch (const Error& e) {
        throw Refusal(400, renamed(e.what(), file, name), "name");
    }
    if (text.size() > MAX_DOCUMENT_BYTES)
        throw Refusal(413, format("%s: its text has %zu bytes, and may have %zu", name.c_str(), text.size(),
                                  MAX_DOCUMENT_BYTES));
    sj::Writer w;
    return w.object().field("name", name).field("text", text).end().text;
}

} // namespace server
