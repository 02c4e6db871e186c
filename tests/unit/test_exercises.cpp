// Exercises out of the laboratories: lab/exercise.awk makes skeletons, lab/check.cpp judges them and counts accesses.
// Two checkers are compiled here; `make exercises-check` compiles all.
#include "tests/process.h"
#include <map>
#include <regex>
#include <set>

static Result skeleton(const std::string& name, const std::string& laboratory) {
    return Process("/usr/bin/env", {"awk", "-v", "name=" + name, "-f", "lab/exercise.awk", laboratory}).wait();
}
static bool is_comment(const std::string& line) { return std::regex_search(line, std::regex("^ *//")); }
static Result make(const std::string& folder, Strings words) {
    return Process("/usr/bin/env", Strings{"-u", "MAKEFLAGS", "-u", "MAKELEVEL", "make", "-s", "-j1", "NVCC=none",
                                           "BUILD=" + folder, "MINE=" + folder + "/mine"} + words).wait();
}

// A laboratory, read by itself: its lines without the marks, and the solutions.
namespace {
struct Marked {
    Strings plain;
    struct Part { Strings hints, instead, solution; };
    std::map<std::string, std::vector<Part>> exercises;
    explicit Marked(const std::string& path) {
        std::string inside;
        bool hints = false;
        for (const std::string& line : lines(read_file(path))) {
            std::smatch found;
            if (std::regex_search(line, found, std::regex("^ *// exercise ([a-z_]+-[0-9]+): "))) {
                REQUIRE(inside == "");
                inside = found[1], hints = true;
                exercises[inside].push_back({{found.suffix()}, {}, {}});
            } else if (std::regex_search(line, std::regex("^ *// end of exercise$"))) {
                REQUIRE(inside != "");
                CHECK(exercises[inside].back().solution.size() > 0);
                inside = "";
            } else if (inside != "" && (hints = hints && is_comment(line)))
                if (const size_t at = line.find("// instead: "); at != line.npos)
                    exercises[inside].back().instead.push_back(line.substr(0, at) + line.substr(at + 12));
                else exercises[inside].back().hints.push_back(line);
            else {
                plain.push_back(line);
                if (inside != "") exercises[inside].back().solution.push_back(line);
            }
        }
        CHECK(inside == "");
    }
};
} // namespace

TEST_CASE("exercises: every laboratory has three or more, with hints; a skeleton has all but the solution") {
    size_t laboratories = 0;
    for (auto& entry : fs::directory_iterator("lab")) {
        if (entry.path().extension() != ".cu" || entry.path().stem() == "check_env") continue;
        const std::string laboratory = entry.path().stem();
        INFO(laboratory);
        const Marked marked(entry.path().string());
        CHECK(marked.exercises.size() >= 3);
        laboratories++;
        for (auto& exercise : marked.exercises) {
            const std::string& name = exercise.first;
            auto& parts = exercise.second;
            INFO(name);
            CHECK(name.compare(0, laboratory.size() + 1, laboratory + "-") == 0);
            const Result r = skeleton(name, entry.path().string());
            REQUIRE(r.status == 0);
            CHECK(r.err == "");
            Strings back; // the skeleton with the solution put back is the laboratory without marks
            size_t part = 0;
            bool inside = false;
            for (const std::string& line : lines(r.out)) {
                CHECK_FALSE(std::regex_search(line, std::regex("// (end of )?exercise|// instead: ")));
                if (line.find("// TODO " + name + ": ") != line.npos) {
                    REQUIRE_FALSE(inside);
                    REQUIRE(part < parts.size());
                    inside = true;
                    back.insert(back.end(), parts[part].solution.begin(), parts[part].solution.end());
                } else if (line.find("// end of TODO") != line.npos) inside = false, part++;
                else if (!inside) back.push_back(line);
                else if (!is_comment(line)) {
                    auto& instead = parts[part].instead;
                    CHECK(std::find(instead.begin(), instead.end(), line) != instead.end());
                }
            }
            CHECK(part == parts.size());
            CHECK(back == marked.plain);
            for (auto& p : parts) {
                CHECK(p.hints.size() >= 2);
                CHECK(p.instead != p.solution);
            }
        }
    }
    CHECK(laboratories == 11);
}
TEST_CASE("exercises: marks that do not fit, and names that there are not, are one line of error") {
    Scratch folder;
    const std::string file = folder / "x.cu", mark = "// exercise x-1: do\n", end = "// end of exercise\n";
    const auto refused = [&](const std::string& text, const std::string& name, const std::string& why) {
        write_file(file, text);
        const Result r = skeleton(name, file);
        INFO(text << r.err);
        CHECK(r.status == 1);
        CHECK(r.out == "");
        CHECK(lines(r.err).size() == 1);
        CHECK(r.err.find(why) != r.err.npos);
    };
    refused(mark + "a;\n", "x-1", "exercise x-1 has no end");
    refused(mark + "a;\n" + mark + "b;\n" + end, "x-1", "x.cu:3: exercise x-1 has no end");
    refused("a;\n" + end, "x-1", "x.cu:2: no exercise ends here");
    refused(mark + "a;\n" + end, "x-2", "there is no exercise x-2; there are: x-1");
    const std::string first = "  // exercise x-1: do\n  // so\n  // instead: b;\n  a; // (a)\n  // end of exercise\n";
    write_file(file, first + mark + "c;\n" + end); // an exercise of two parts
    CHECK(skeleton("x-1", file).out ==
          "  // TODO x-1: do\n  // so\n  b;\n  // end of TODO\n// TODO x-1: do\n// end of TODO\n");
}
TEST_CASE("exercises: a skeleton is wrong, the solution right; conflicts and uncoalesced accesses are counted") {
    Scratch folder;
    const std::string mine = folder / "mine/transpose_copy-6.cu", name = "transpose_copy-6";
    const auto has = [](const Result& r, const std::string& text) {
        INFO(r.out << r.err);
        CHECK(r.out.find(text) != r.out.npos);
    };
    CHECK(make(folder.path, {"check-" + name}).err.find("there is no " + mine) == 0);
    CHECK(make(folder.path, {"exercise-transpose_copy-99"}).err.find("there is no exercise transpose_copy-99") == 0);
    Result r = make(folder.path, {"exercise-" + name});
    CHECK(r.status == 0);
    const std::string text = read_file(mine);
    CHECK(text == skeleton(name, "lab/transpose_copy.cu").out);
    write_file(mine, text + "// mine\n");
    r = make(folder.path, {"exercise-" + name});
    CHECK(r.status != 0);
    CHECK(r.err.find(mine + " is there") == 0);
    CHECK(read_file(mine) == text + "// mine\n");
    r = make(folder.path, {"check-" + name});
    CHECK(r.status != 0);
    has(r, "wrong: the largest error is ");
    has(r, "; element 0 of 3264: got ");

    // The laboratory itself, whose counts are known: 4 tiles of 32 x 32.
    const std::string checker = folder / "exercises/lab/transpose_copy";
    r = make(folder.path, {checker});
    INFO(r.err);
    REQUIRE(r.status == 0);
    const auto check = [&](const char* step) {
        const Result said = Process(checker.c_str(), {step, "--size", "64x64"}).wait();
        CHECK(said.status == 0);
        has(said, ", 64x64x64: right, with the threads in two orders\n");
        return said;
    };
    const auto line_of = [](const std::string& code) {
        const std::string all = read_file("lab/transpose_copy.cu");
        REQUIRE(all.find(code) != all.npos);
        const auto before = std::count(all.begin(), all.begin() + (long)all.find(code), '\n');
        return "  lab/transpose_copy.cu:" + std::to_string(before + 1) + ": ";
    };
    const auto global = [](int sectors, int bad) { // of 1,024 numbers, by 128 warps
        return format("global memory: 128 loads and 128 stores of warps take %d sectors, 1024 are enough; "
                      "uncoalesced: %d\n", sectors, bad);
    };
    const auto shared = [](int wavefronts, int bad) {
        return format("shared memory: 128 loads and 128 stores of warps take %d wavefronts, 256 are enough; "
                      "with bank conflicts: %d\n", wavefronts, bad);
    };
    Result said = check("1");
    has(said, global(1024, 0)); // 4 sectors a warp
    CHECK(said.out.find("shared") == said.out.npos);
    said = check("2");
    has(said, global(128 * 4 + 128 * 32, 128)); // 32 sectors a store
    has(said, line_of("out[(size_t)c * rows + r] = in[(size_t)r * columns + c];") +
                  "128 uncoalesced stores, up to 32 sectors\n");
    said = check("4");
    has(said, global(1024, 0));
    has(said, shared(128 + 128 * 32, 128)); // 32 wavefronts a load of a column
    has(said, line_of("tile[place<PLACE>(x, y)];") + "128 loads of shared memory with conflicts, up to 32 ways\n");
    for (const char* step : {"5", "6"}) {
        said = check(step);
        has(said, global(1024, 0) + shared(256, 0));
        CHECK(said.out.find("\n  ") == said.out.npos);
    }
    said = check("7"); // 16 bytes a thread: 16 sectors a warp
    has(said, "global memory: 32 loads and 32 stores of warps take 1024 sectors, 1024 are enough; uncoalesced: 0\n");
    has(said, shared(256, 0));
}
TEST_CASE("exercises: docs/course.md has each of them, in both languages") {
    std::set<std::string> all;
    for (auto& entry : fs::directory_iterator("lab"))
        if (entry.path().extension() == ".cu")
            for (auto& [name, parts] : Marked(entry.path().string()).exercises) all.insert(name);
    const std::string page = read_file("docs/course.md");
    const size_t english = page.find("\n# A course");
    REQUIRE(english != page.npos);
    for (const std::string& half : {page.substr(0, english), page.substr(english)}) {
        std::set<std::string> named;
        const std::regex name("`([a-z_]+-[0-9]+)`");
        for (std::sregex_iterator i(half.begin(), half.end(), name), end; i != end; ++i) named.insert((*i)[1]);
        CHECK(named == all);
    }
}
