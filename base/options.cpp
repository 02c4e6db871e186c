#include "base/options.h"
#include "base/text.h"
#include "base/unfinished.h"

void take_signals(std::initializer_list<int> stop, std::initializer_list<int> ignored) {
    struct sigaction action = {};
    action.sa_handler = [](int number) { interrupted = 1, signal(number, end_by_signal); };
    for (int s : stop) sigaction(s, &action, nullptr);
    for (int s : ignored) signal(s, SIG_IGN);
}

double parse_number(const char* option, const char* text, double low, double high) {
    char* end;
    errno = 0;
    double v = strtod(text, &end);
    if (end == text || *end || errno || !(v >= low && v <= high) || isspace((unsigned char)*text))
        DIE("%s: %.60s is not a number from %g to %g", option, text, low, high);
    return v;
}

int64_t parse_integer(const char* option, const char* text, int64_t low, int64_t high) {
    char* end;
    errno = 0;
    long long v = strtoll(text, &end, 10);
    if (end == text || *end || errno || v < low || v > high || isspace((unsigned char)*text))
        DIE("%s: %.60s is not a whole number from %lld to %lld", option, text, (long long)low, (long long)high);
    return v;
}

Setter text(std::string& to) {
    return [&to](const char* option, const char* v) { must_be_utf8(option, v), to = v; };
}

Setter file_name(std::string& to) { // (or of a folder)
    return [&to](const char* option, const char* v) {
        if (!*v) DIE("%s needs a value", option);
        to = v;
    };
}

Setter existing(std::string& to) {
    return [&to](const char* option, const char* v) { file_name(to)(option, v), must_exist(option, v, false); };
}

Setter existing_file(std::string& to, bool or_stdin) {
    return [&to, or_stdin](const char* option, const char* v) {
        file_name(to)(option, v);
        if (!or_stdin || to != "-") must_exist(option, v, true);
    };
}

Setter output_file(std::string& to) {
    return [&to](const char* option, const char* v) { file_name(to)(option, v), must_be_writable(option, v); };
}

Setter list(std::vector<std::string>& to) { // each time one more
    return [&to](const char* option, const char* v) {
        if (!*v) DIE("%s needs some text", option);
        must_be_utf8(option, v);
        to.push_back(v);
    };
}

Setter one_of(std::string& to, std::vector<std::string> names) {
    return [&to, names = std::move(names)](const char* option, const char* v) {
        std::string all;
        for (auto& n : names) {
            if (n == v) return void(to = n);
            all += (all.empty() ? "" : &n == &names.back() ? " or " : ", ") + n;
        }
        DIE("%s %.40s: %s", option, v, all.c_str());
    };
}

std::vector<std::string> parse(const std::vector<Option>& table, int argc, char** argv) {
    const auto find = [&](const std::string& name) {
        const Option* found = nullptr;
        for (auto& o : table)
            if (*o.name && (name == o.name || name == o.brief)) found = &o;
        return found;
    };
    std::vector<std::string> words;
    bool only_words = false;
    for (int i = 1; i < argc; i++) {
        std::string name = argv[i];
        if (only_words || name.size() < 2 || name[0] != '-') {
            words.push_back(name);
            continue;
        }
        if (name == "--") {
            only_words = true;
            continue;
        }
        const char* attached = nullptr; // --name=value
        if (const size_t eq = name.find('='); name[1] == '-' && eq != name.npos)
            attached = argv[i] + eq + 1, name.resize(eq);
        const Option* found = find(name);
        if (!found) DIE("unknown option %s (--help lists them)", name.c_str());
        const std::string value = found->value;
        if (value.empty() && attached) DIE("%s takes no value", name.c_str());
        if (value.empty()) {
            found->set(name.c_str(), "");
        } else if (value[0] == '[') {
            const char* next = attached ? attached : i + 1 < argc ? argv[i + 1] : "";
            const bool same = "[" + std::string(next) + "]" == value;
            if (attached && !same) DIE("%s takes no value but %s", name.c_str(), value.c_str());
            i += same && !attached;
            found->set(name.c_str(), same ? next : "");
        } else {
            const bool two = value.find(' ') != value.npos;
            for (size_t left = 1 + two; left > 0; left--) {
                if (!attached && i + 1 == argc) DIE("%s needs a value", name.c_str());
                const char* next = attached ? attached : argv[++i];
                if (two && !attached && *next == '-' && find(std::string(next, strcspn(next, "="))))
                    DIE("%s %s: both values come before %s", name.c_str(), value.c_str(), next);
                found->set(name.c_str(), next);
                attached = nullptr;
            }
        }
    }
    return words;
}

void stdout_failed() {
    if (errno == EPIPE) end_by_signal(SIGPIPE);
    DIE("standard output: %s", strerror(errno));
}

void write_stdout(std::string_view text) {
    if (fwrite(text.data(), 1, text.size(), stdout) != text.size() || fflush(stdout) != 0) stdout_failed();
}

bool told_version(const char* program, int argc, char** argv) {
    if (argc != 2 || strcmp(argv[1], "--version") != 0) return false;
    write_stdout(format("%s %d\n", program, QWEN3_VERSION));
    return true;
}

std::string help_text(const std::vector<Option>& table) {
    constexpr size_t COLUMN = 28;
    std::string all;
    for (auto& o : table) {
        if (!*o.name) {
            all += format("%s:\n", o.help);
            continue;
        }
        std::string line = *o.brief ? format("  %s, %s", o.brief, o.name) : format("      %s", o.name);
        if (*o.value) line += format(" %s", o.value);
        if (line.size() >= COLUMN) all += line + "\n", line.clear();
        const std::string_view help = o.help;
        for (size_t at = 0, end; at <= help.size(); at = end + 1, line.clear()) {
            end = std::min(help.find('\n', at), help.size());
            line.resize(COLUMN, ' ');
            all.append(line).append(help.substr(at, end - at)) += '\n';
        }
    }
    return all;
}
