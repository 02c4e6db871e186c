// README and docs/: what they name exists. Options are in a program's --help, links and files are there, error messages
// are in the sources, and the Chinese pages have what the English ones have.
// Environment: QWEN3, TRAIN_LORA, DATAGEN and SERVE name the programs (default ./NAME).
#include "tests/process.h"
#include <map>
#include <regex>
#include <set>

using namespace std::literals;

static std::string read(const fs::path& path) {
    INFO(path.string());
    REQUIRE(fs::is_regular_file(path));
    return fs::file_size(path) ? std::string(MappedFile(path.string()).text()) : "";
}

static std::vector<fs::path> pages() {
    std::vector<fs::path> all = {"README.md", "README.zh.md", "CONTRIBUTING.md", "deploy/course/README.md"};
    for (auto& entry : fs::recursive_directory_iterator("docs"))
        if (entry.path().extension() == ".md") all.push_back(entry.path());
    return all;
}

// Our sources: those in the root and in the rooms.
static const Strings ROOMS = {"base", "model", "cpu", "gpu", "form", "book", "search", "train", "server", "cli", "capi"};
static std::vector<fs::path> our_files() {
    std::vector<fs::path> all;
    auto add = [&](const fs::directory_entry& entry) {
        const std::string extension = entry.path().extension();
        if (std::set<std::string>{".cu", ".cpp", ".h", ".py"}.count(extension)) all.push_back(entry.path());
    };
    for (auto& entry : fs::directory_iterator(".")) add(entry);
    for (auto& room : ROOMS)
        for (auto& entry : fs::recursive_directory_iterator(room)) add(entry);
    return all;
}

// A regular expression, built once: that takes far longer than to match a line.
static const std::regex& regex(const std::string& pattern) {
    static std::map<std::string, std::regex> known;
    auto at = known.find(pattern);
    if (at == known.end()) at = known.emplace(pattern, std::regex(pattern)).first;
    return at->second;
}

// The matches of `pattern` in the text, or of its first group.
static Strings matches(const std::string& text, const char* pattern) {
    Strings all;
    for (std::sregex_iterator i(text.begin(), text.end(), regex(pattern)), end; i != end; ++i)
        all.push_back((*i)[i->size() > 1]);
    return all;
}

// The lines of the fenced blocks, without comments; lines that end in a backslash are joined.
static Strings code_lines(const std::string& page) {
    Strings all;
    bool inside = false;
    std::string before;
    for (std::string line : lines(page)) {
        if (line.compare(0, 3, "```") == 0) {
            inside = !inside;
            continue;
        }
        if (!inside) continue;
        line = std::regex_replace(before + line, regex("(^|\\s+)#.*"), "");
        before = line.size() && line.back() == '\\' ? line.substr(0, line.size() - 1) : "";
        if (before.empty()) all.push_back(line);
    }
    return all;
}

// ----------------------------------------------------------------------------------------- options

static std::string program(const char* variable, const char* otherwise) {
    return getenv(variable) ? getenv(variable) : otherwise;
}

// The options of "qwen3", "datagen chunk" and so on: what begins a line of --help. Of a script: what is in its text.
// A program that is not here (serve needs a library) has none.
static const std::map<std::string, std::set<std::string>>& options() {
    static const std::map<std::string, std::set<std::string>> known = [] {
        std::map<std::string, std::set<std::string>> all;
        auto ask = [&](const std::string& name, const std::string& path, Strings arguments) {
            if (path.find('/') != path.npos && !fs::exists(path)) return;
            arguments.push_back("--help");
            const Result r = Process(path.c_str(), arguments).wait();
            INFO(name << ": " << r.err);
            REQUIRE(r.status == 0);
            for (auto& line : lines(r.out)) {
                std::smatch found;
                if (std::regex_search(line, found, regex("^ +(-[A-Za-z], )?(--[a-z][a-z0-9-]*)"))) {
                    all[name].insert(found[2]);
                    if (found[1].matched) all[name].insert(found[1].str().substr(0, 2));
                }
            }
        };
        ask("qwen3", program("QWEN3", "./qwen3"), {});
        ask("train_lora", program("TRAIN_LORA", "./train_lora"), {});
        ask("serve", program("SERVE", "./serve"), {});
        const std::string datagen = program("DATAGEN", "./datagen");
        ask("datagen", datagen, {});
        for (const char* command :
             {"chunk", "prompt", "generate", "collect", "filter", "split", "pack", "unpack", "stats", "grade", "score"})
            ask(format("datagen %s", command), datagen, {command});
        for (const char* script : {"export.py", "get", "teach", "tests/bench/bench_serve.cpp", "lab/lab.h"})
            if (fs::exists(script))
                for (auto& name : matches(read(script), "[^a-z-](--?[a-z][a-z0-9-]*)"))
                    all[script == "export.py"s ? script : fs::path(script).stem()].insert(name);
        for (auto& [name, list] : all) list.insert("--help");
        return all;
    }();
    return known;
}

// The commands in a line of a shell: those between && ; | and the like, as words; without what is in quotes.
static std::vector<Strings> commands(const std::string& line) {
    std::vector<Strings> all;
    const std::string bare = std::regex_replace(line, regex("\"[^\"]*\"|'[^']*'"), "TEXT");
    for (auto& part : matches(bare, "[^&;|()]+")) all.push_back(matches(part, "[^\\s]+"));
    return all;
}

TEST_CASE("docs: every option of a command is one of its program's") {
    size_t checked = 0;
    for (auto& page : pages()) {
        const std::string text = read(page);
        Strings found = code_lines(text);
        for (auto& span : matches(text, "`([^`\n]+)`")) found.push_back(span);
        for (auto& line : found)
            for (auto& words : commands(line)) {
                size_t at = 0;
                while (at < words.size() && words[at].find('=') != std::string::npos) at++; // VARIABLE=value
                if (at < words.size() && words[at] == "python3") at++;
                if (at == words.size()) continue;
                std::string name = words[at].compare(0, 2, "./") == 0 ? words[at].substr(2) : words[at];
                if (name == "datagen" && at + 1 < words.size() && options().count("datagen " + words[at + 1]))
                    name += " " + words[++at];
                const auto known = options().find(name);
                if (known == options().end()) continue;
                for (at++; at < words.size() && words[at] != "--"; at++) {
                    const std::string option = words[at].substr(0, words[at].find('='));
                    if (option.size() < 2 || option[0] != '-' || !isalpha(option[1 + (option[1] == '-')])) continue;
                    INFO(page.string() << ": " << line << ": " << name << " has no " << option);
                    CHECK(known->second.count(option) == 1);
                    checked++;
                }
            }
    }
    CHECK(checked > 80);
}

TEST_CASE("docs: every option that is named is some program's") {
    std::set<std::string> known = {"--gpus", "--stop-timeout", "--now", "--version",
                                   "--nproc-per-node", "--no-python", "--nnodes", "--node-rank", "--master-addr",
                                   "--ntasks-per-node", "--gpus-per-task", "--sandbox", "--shape",
                                   "--install", "--update", "--shutdown", "--query-gpu", "--format", "--logdir", "--tasks",
                                   "--random-source"};
    // (docker, systemctl, nvcc; launchers; pandoc; tests/reference/parity.py; wsl, nvidia-smi, tensorboard, lm_eval, shuf)
    for (const char* name : {"qwen3", "train_lora", "datagen", "serve", "export.py", "get", "teach"}) {
        if (!options().count(name)) {
            printf("skipped: options named in docs: there is no %s here\n", name);
            return;
        }
    }
    for (auto& [name, list] : options()) known.insert(list.begin(), list.end());
    for (auto& page : pages())
        for (auto& option : matches(read(page), "(?:^|[^A-Za-z0-9-])(--[a-z][a-z0-9-]*)")) {
            INFO(page.string() << ": " << option);
            CHECK(known.count(option) == 1);
        }
}

// ----------------------------------------------------------------------------------------- links and files

// The anchor that GitHub derives from a heading: lower case, blanks as hyphens, without punctuation.
static std::string anchor(const std::string& heading) {
    std::string all;
    for (char c : heading)
        if (c == ' ') all += '-';
        else if (c == '-' || c == '_' || isalnum((unsigned char)c) || c < 0) all += (char)(c < 0 ? c : tolower(c));
    return all;
}

TEST_CASE("docs: links lead somewhere, and pages list their own sections") {
    std::map<fs::path, std::set<std::string>> known; // the anchors of a page
    for (auto& page : pages()) {
        const std::string text = read(page);
        for (auto& target : matches(text, "\\]\\(([^)]+)\\)")) {
            if (target.compare(0, 4, "http") == 0) continue;
            INFO(page.string() << ": " << target);
            const size_t hash = std::min(target.find('#'), target.size());
            const fs::path file = hash ? page.parent_path() / target.substr(0, hash) : page;
            CHECK(fs::exists(file));
            if (hash == target.size() || !fs::exists(file)) continue;
            std::set<std::string>& anchors = known[file.lexically_normal()];
            if (anchors.empty())
                for (auto& heading : matches(read(file), "(?:^|\n)#+ ([^\n]+)")) anchors.insert(anchor(heading));
            CHECK(anchors.count(target.substr(hash + 1)) == 1);
        }
        const Strings sections = matches(text, "\n## ([^\n]+)");
        if (text.find("\nContents: ") != text.npos || text.find("\n目录：") != text.npos)
            for (auto& section : sections) {
                INFO(page.string() << " does not list its section " << section);
                CHECK(text.find("(#" + anchor(section) + ")") != text.npos);
            }
    }
}

TEST_CASE("docs: files of the repository that are named are there") {
    const std::set<std::string> elsewhere = {"doctest/doctest.h", "stdio.h", "llama.cpp", "mine.cpp",
                                             "build/qwen3_single.cu"}; // (make single)
    for (auto& page : pages()) {
        const std::string text = std::regex_replace(read(page), regex("https?://[^\\s)`]+"), "");
        for (auto& word : matches(text, "[A-Za-z0-9_./-]+")) {
            const std::string name = word.compare(0, 2, "./") == 0 ? word.substr(2) : word;
            if (elsewhere.count(name)) continue;
            if (std::regex_match(name, regex("(tests|docs|data|lab)/.*|.*\\.(cu|cpp|h|py|sh)"))) {
                INFO(page.string() << ": " << name);
                const bool built = fs::exists(name + ".cu"); // lab/matmul
                const bool beside = fs::exists(page.parent_path() / name);
                CHECK((fs::exists(name) || built || beside || fs::exists(name.substr(0, name.size() - 1)))); // (a sentence's dot)
            }
        }
    }
}

// (Steps by their names: tests/laboratory.h.)
TEST_CASE("docs: laboratories that the course's notes name are there") {
    size_t links = 0;
    for (auto& note : fs::directory_iterator("data/course/notes"))
        for (auto& line : lines(read(note.path())))
            if (line.compare(0, 2, "> ") == 0)
                for (auto& name : matches(line, "`(lab/[^`]+)`")) {
                    INFO(note.path().string() << ": " << name);
                    CHECK((fs::exists(name + ".cu") || fs::exists(name)));
                    links++;
                }
    CHECK(links > 60);
}

TEST_CASE("docs: the laboratories' Python compiles") { // (what it needs to run, CI has not)
    Strings words = {"python3", "-c", "import sys\nfor f in sys.argv[1:]: compile(open(f).read(), f, 'exec')"};
    for (const char* folder : {"lab", "lab/triton"})
        for (auto& entry : fs::directory_iterator(folder))
            if (entry.path().extension() == ".py") words.push_back(entry.path().string());
    CHECK(words.size() == 6);
    const Result r = Process("/usr/bin/env", words).wait();
    CHECK(r.err == "");
    CHECK(r.status == 0);
}

TEST_CASE("docs: architecture.md knows every source file in the root, and every folder of sources") {
    const std::string text = read("docs/architecture.md");
    std::set<std::string> names;
    for (auto& file : our_files()) {
        const std::string folder = file.parent_path().string();
        names.insert(folder == "." ? file.filename().string() : folder + "/");
    }
    CHECK(names.count("qwen3.cu") == 1);
    CHECK(names.count("server/api/") == 1);
    for (auto& name : names) {
        INFO(name);
        CHECK(text.find("`" + name + "`") != text.npos);
    }
}

// ----------------------------------------------------------------------------------------- what programs say

// The cells of a page's tables, row by row, without the rows below headings.
static std::vector<Strings> rows(const std::string& page) {
    std::vector<Strings> all;
    for (auto& line : lines(page)) {
        if (line.empty() || line[0] != '|' || line.compare(0, 4, "|---") == 0) continue;
        all.push_back(matches(std::regex_replace(line, regex("\\\\\\|"), "/"), "[^|]+"));
    }
    return all;
}

// Every string of a source is one piece: "a " "b" is "a b".
static std::string sources() {
    std::string all = read("get") + read("teach");
    for (auto& file : our_files()) all += read(file);
    std::string joined;
    for (size_t i = 0; i < all.size(); i++) {
        if (all[i] == '\\' && i + 1 < all.size() && all[i + 1] == '"') {
            joined += all[++i];
            continue;
        }
        if (all[i] == '"') { // does another one follow?
            const size_t next = all.find_first_not_of(" \n", i + 1);
            if (next != all.npos && all[next] == '"') {
                i = next;
                continue;
            }
        }
        joined += all[i];
    }
    return joined;
}

TEST_CASE("docs: the messages in troubleshooting.md are what the programs say") {
    const std::set<std::string> of_others = {"sudo: command not found", "Illegal instruction",
                                             "no kernel image is available", ": Address already in use",
                                             ": No such file or directory", ": No space left on device", "Couldn't connect to server"};
    const Strings without = {"make", "-s", "info", "NVCC=none", "CXX=g++", "CURL=", "MHD=", "CMARK=", "EDIT=", "OPENMP="};
    const Result bare = Process("/usr/bin/env", without).wait();
    REQUIRE(bare.status == 0);
    const std::string all = sources() + bare.out; // (the Makefile puts its lines together)
    size_t checked = 0;
    for (auto& row : rows(read("docs/troubleshooting.md")))
        for (auto& span : matches(row[0], "`([^`]+)`"))
            for (auto& piece : matches(span, "(?:[^\xe2]|\xe2(?!\x80\xa6))+")) { // between one … and the next
                const std::string text = std::regex_replace(piece, regex("^\x80\xa6"), "");
                if (text.size() < 6 || of_others.count(text)) continue;
                INFO("no program says: " << text);
                CHECK(all.find(text) != all.npos);
                checked++;
            }
    CHECK(checked > 80);
}

// ----------------------------------------------------------------------------------------- two languages

// Numbers as they are written: "21,164", "0.92". Those behind a letter are names (H100, Q8_0).
static Strings figures(const std::string& text) {
    return matches(text, "(?:^|[^A-Za-z0-9_.,])([0-9][0-9,.]*[0-9]|[0-9])");
}

TEST_CASE("docs: the Chinese pages have the English ones' rows and commands") {
    const std::vector<Strings> english = rows(read("docs/troubleshooting.md"));
    const std::vector<Strings> chinese = rows(read("docs/troubleshooting.zh.md"));
    REQUIRE(english.size() == chinese.size());
    for (size_t i = 0; i < english.size(); i++) {
        INFO(english[i][0]);
        CHECK(matches(english[i][0], "`([^`]+)`") == matches(chinese[i][0], "`([^`]+)`"));
    }
    const std::string readme = read("README.md"), translated = read("README.zh.md");
    auto commands_of = [](const std::string& page) { // questions and addresses differ
        Strings all = code_lines(page);
        for (auto& line : all) line = std::regex_replace(line, regex("\"[^\"]*\""), "TEXT");
        return all;
    };
    CHECK(commands_of(readme) == commands_of(translated));
    const std::vector<Strings> left = rows(readme), right = rows(translated);
    REQUIRE(left.size() == right.size());
    for (size_t i = 0; i < left.size(); i++) { // the same figures
        REQUIRE(left[i].size() == right[i].size());
        for (size_t cell = 0; cell < left[i].size(); cell++) {
            INFO(left[i][cell] << " / " << right[i][cell]);
            const char* figure = "[0-9][0-9,.]*[0-9]|[0-9]";
            Strings one = matches(left[i][cell], figure), other = matches(right[i][cell], figure);
            std::sort(one.begin(), one.end()), std::sort(other.begin(), other.end());
            CHECK(one == other);
        }
    }
}

// The page without its fenced blocks and without the targets of its links.
static std::string prose(const std::string& page) {
    std::string all;
    bool inside = false;
    for (auto& line : lines(page)) {
        const bool fence = line.compare(0, 3, "```") == 0;
        if (!fence && !inside) all += std::regex_replace(line, regex("\\]\\([^)]*\\)"), "]") + "\n";
        inside ^= fence;
    }
    return all;
}

// Commands compare without their comments, indentation and quoted text.
static std::set<std::string> bare_lines(const std::string& page) {
    std::set<std::string> all;
    for (auto& line : code_lines(page)) {
        const std::string quoted = std::regex_replace(line, regex("\"[^\"]*\"|'[^']*'"), "TEXT");
        all.insert(std::regex_replace(quoted, regex("^\\s+|\\s+$"), ""));
    }
    return all;
}

static std::string head(const std::string& page) {
    std::string all;
    for (auto& line : lines(page)) {
        if (line.compare(0, 3, "```") == 0 || line.compare(0, 3, "## ") == 0) break;
        all += line + "\n";
    }
    return all;
}

TEST_CASE("docs: commands and figures of docs/X.zh.md stand in docs/X.md, and the two link to each other") {
    size_t twins = 0;
    for (auto& page : pages()) {
        const std::string name = page.filename().string();
        const size_t suffix = name.find(".zh.md");
        if (suffix == name.npos || page.parent_path() != "docs") continue;
        twins++;
        const std::string twin = name.substr(0, suffix) + ".md";
        const std::string chinese = read(page), english = read("docs/" + twin);
        INFO(name);
        CHECK(head(chinese).find("](" + twin + ")") != std::string::npos);
        CHECK(head(english).find("](" + name + ")") != std::string::npos);
        const std::set<std::string> known_lines = bare_lines(english);
        for (auto& line : bare_lines(chinese)) {
            INFO(twin << " has no line " << line);
            CHECK((line.empty() || known_lines.count(line) == 1));
        }
        const Strings there = figures(english);
        const std::set<std::string> known(there.begin(), there.end());
        for (auto& figure : figures(prose(chinese)))
            if (figure.size() > 1) { // one digit: a word of the twin's may say it
                INFO(twin << " has no " << figure);
                CHECK(known.count(figure) == 1);
            }
    }
    CHECK(twins >= 1);
}

// ----------------------------------------------------------------------------------------- the README

TEST_CASE("docs: the README is short, and counts our lines") {
    const std::string text = read("README.md");
    CHECK(lines(text).size() <= 120);
    size_t actual = 0;
    for (auto& file : our_files())
        if (file.extension() != ".py") actual += lines(read(file)).size();
    const Strings said = matches(text, "([0-9,]+) of C\\+\\+ and CUDA");
    REQUIRE(said.size() == 1);
    const double figure = std::stod(std::regex_replace(said[0], regex(","), ""));
    INFO("the README says " << figure << " lines, there are " << actual);
    CHECK(std::abs(figure - (double)actual) < 0.1 * (double)actual);
}

TEST_CASE("docs: figures that the README says were measured are in performance.md") {
    const std::string page = read("docs/performance.md"), text = read("README.md");
    CHECK(lines(page).size() <= 250);
    const Strings there = figures(page);
    const std::set<std::string> known(there.begin(), there.end());
    size_t checked = 0;
    auto check = [&](const std::string& claim) {
        for (auto& figure : figures(claim)) {
            INFO("docs/performance.md has no " << figure << ": " << claim);
            CHECK(known.count(figure) == 1);
            checked++;
        }
    };
    const size_t begin = text.find("\n## Comparison with other projects\n"), end = text.find("\n## Models and memory\n");
    REQUIRE(begin < end);
    REQUIRE(end != text.npos);
    const std::string section = text.substr(begin, end - begin);
    const std::vector<Strings> table = rows(section);
    REQUIRE(table.size() > 5);
    REQUIRE(table[0].size() > 4);
    CHECK(table[0][4] == " measured ");
    for (auto& row : table) {
        REQUIRE(row.size() > 4);
        check(row[4]);
    }
    const size_t behind = section.find("[Where we are behind]");
    REQUIRE(behind != section.npos);
    check(section.substr(behind, section.find("\n\n", behind) - behind));
    CHECK(checked > 30);
}

TEST_CASE("docs: the picture is what docs/session.py draws of the recording") {
    Scratch folder;
    for (const char* name : {"session.py", "session.cast"}) fs::copy(fs::path("docs") / name, folder.path / name);
    const Result r = Process("/usr/bin/env", {"python3", folder / "session.py", "svg"}).wait();
    INFO(r.err);
    REQUIRE(r.status == 0);
    const std::string picture = read("docs/session.svg");
    CHECK(read(folder / "session.svg") == picture);
    CHECK(picture.size() < 60000);
}
