// deploy/course: the folder that pack.sh makes, started as the course starts it. In place of uvicorn stands a line of Python
// with its arguments (tests/reference/check_course.sh has the real one). Environment: SERVE, default ./serve.
#include "sj.h"
#include "tests/http.h"
#include "tests/process.h"
#include <csignal>

static const std::string SERVE_PROGRAM = fs::absolute(getenv("SERVE") ? getenv("SERVE") : "./serve").string();
static const std::string ROOT_FOLDER = fs::current_path().string();

static Result pack(const Strings& words) { return Process((ROOT_FOLDER + "/deploy/course/pack.sh").c_str(), words).wait(); }

TEST_CASE("the course's folder: uvicorn's process becomes the server on its host and port, and ends on SIGTERM") {
    Scratch scratch;
    const std::string folder = scratch / "hand in 包";
    const Result packed = pack({folder, SERVE_PROGRAM});
    INFO(packed.err);
    REQUIRE(packed.status == 0);
    CHECK(packed.out.find(folder + ": ") == 0);
    for (const char* part : {"Dockerfile", "serve.py", "README.md", "get", "bin/serve"}) CHECK(fs::exists(folder + "/" + part));
    CHECK(!fs::exists(folder + "/adapter"));
    for (auto& entry : fs::directory_iterator(folder + "/lib")) CHECK(entry.path().filename().string().find("libc.so") != 0);
    fs::create_symlink(ROOT_FOLDER + "/data/tiny/model.bin", folder + "/model"); // (else a folder of Hugging Face's)
    fs::create_symlink(ROOT_FOLDER + "/data/tiny/tokenizer.bin", folder + "/tokenizer.bin");
    write_file(folder + "/system.txt", "You answer questions.\n");

    const std::string port = std::to_string(free_port());
    for (const Strings& words : {Strings{"--host", "127.0.0.1", "--port", port}, {"--port=" + port, "--host=127.0.0.1"}}) {
        Strings line = {"python3", "-c", "import serve", "serve:app"};
        line.insert(line.end(), words.begin(), words.end());
        Process server("/usr/bin/env", line, "", [&] {
            setenv("UVICORN_PORT", "1", 1); // (the option counts)
            if (chdir(folder.c_str()) != 0) _exit(126);
        });
        for (const double start = seconds(); server.err.text().find("listening on") == std::string::npos; usleep(10'000)) {
            INFO(server.err.text());
            REQUIRE(seconds() - start < 60);
        }
        CHECK(server.err.text().find("listening on http://127.0.0.1:" + port + "/") != std::string::npos);
        const int at = atoi(port.c_str());
        CHECK(Http(at).call("GET", "/").body == R"({"status": "batch"})");
        const Json one(Http(at).call("POST", "/predict", R"({"prompt": "What is a warp?"})").body);
        const Json many(Http(at).call("POST", "/predict", R"({"prompt": ["What is a warp?", "什么是 warp？"]})").body);
        CHECK(one["response"].str().find("32 threads") != std::string::npos);
        REQUIRE(many["response"].size() == 2);
        CHECK(many["response"][(size_t)0].str() == one["response"].str());
        kill(server.pid, SIGTERM);
        CHECK(server.wait().status == 0);
    }
}

TEST_CASE("the course's folder: an adapter goes with it; what is missing is one line, and nothing is left") {
    Scratch scratch;
    const std::string folder = scratch / "out", adapter = scratch / "adapter";
    auto refused = [&](const Strings& words, const std::string& why) { // (the script's own name, whatever it is called by)
        const Result r = pack(words);
        INFO(r.err);
        CHECK(r.status == 1);
        CHECK(r.out == "");
        CHECK(r.err.find("pack.sh: ") == 0);
        CHECK(r.err.find(why) != std::string::npos);
        CHECK(lines(r.err).size() == 1);
        CHECK(fs::is_empty(scratch.path) != fs::exists(adapter));
    };
    refused({folder, scratch / "no program"}, "no program: no such program");
    fs::create_directory(adapter);
    write_file(adapter + "/adapter_config.json", "{}");
    refused({folder, SERVE_PROGRAM, adapter}, "adapter_model.safetensors is missing");
    write_file(adapter + "/adapter_model.safetensors", "x");
    write_file(adapter + "/state.safetensors", "of the training: not for the hand-in");
    CHECK(pack({folder, SERVE_PROGRAM, adapter}).status == 0);
    CHECK(read_file(folder + "/adapter/adapter_model.safetensors") == "x");
    CHECK(!fs::exists(folder + "/adapter/state.safetensors"));
    const Result again = pack({folder, SERVE_PROGRAM});
    CHECK(again.status == 1);
    CHECK(again.err.find("exists; remove it or name another folder") != std::string::npos);
}
