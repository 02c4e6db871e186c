// against transformers' apply_chat_template (fixtures/chat.jsonl, see make_chat_fixtures.py);
// what it refuses; that no text of a caller becomes a special token.
#include "base/file.h"
#include "model/chat_template.h"
#include "model/tokenizer.h"
#include "sj.h"
#include <doctest/doctest.h>

using Ids = std::vector<int>;

static const Tokenizer& tokenizer() {
    static const Tokenizer t("tokenizer.bin");
    return t;
}

static std::vector<Message> messages_of(std::string_view json) {
    sj::Doc doc;
    REQUIRE(sj::parse(doc, json) == "");
    return messages_from_json(doc.root());
}

template <class F> std::string error_of(F f) {
    try {
        f();
    } catch (const Error& e) {
        return e.what();
    }
    return "";
}

TEST_CASE("text and ids are transformers'") {
    MappedFile file("tests/fixtures/chat.jsonl");
    std::string_view rest = file.text();
    int rows = 0, with_tools = 0, thinking = 0;
    while (!rest.empty()) {
        std::string_view line = rest.substr(0, rest.find('\n'));
        rest.remove_prefix(line.size() + 1);
        sj::Doc doc;
        REQUIRE(sj::parse(doc, line) == "");
        sj::Value row = doc.root();
        INFO(row["name"].str());

        std::vector<Message> messages = messages_from_json(row["messages"]);
        std::vector<std::string> tools = tools_from_json(row["tools"]);
        ChatOptions options{row["thinking"].boolean(), row["generation_prompt"].boolean()};
        Ids ids;
        for (sj::Value id : row["ids"].items()) ids.push_back(int(id.number()));

        CHECK(render_text(messages, options, tools) == row["text"].str());
        CHECK(render_chat(tokenizer(), messages, options, tools) == ids);
        CHECK(tokenizer().decode(ids, false) == tokenizer().nfc(row["text"].str()));
        rows++, with_tools += !tools.empty(), thinking += options.thinking;
    }
    CHECK(rows >= 60);
    CHECK(with_tools >= 8);
    CHECK(thinking >= 20);
}

TEST_CASE("the prompt of a command line") {
    CHECK(render_chat(tokenizer(), {{"user", "\nx"}}) ==        // "user\n" + "\nx" holds the one token 271
          Ids{151644, 872, 271, 87, 151645, 198, 151644, 77091, 198, 151667, 271, 151668, 271});
    CHECK(render_chat(tokenizer(), {{"system", "s"}, {"user", "x"}}, {/*thinking*/ true}) ==
          Ids{151644, 8948, 198, 82, 151645, 198, 151644, 872, 198, 87, 151645, 198, 151644, 77091, 198});
    CHECK(render_chat(tokenizer(), {{"user", "x"}}, {false, /*generation_prompt*/ false}) ==
          Ids{151644, 872, 198, 87, 151645, 198});
}

TEST_CASE("a caller's text never becomes a special token") {
    // a conversation and tools with s in every place that a caller can fill
    auto messages = [](const std::string& s) {
        return std::vector<Message>{{"system", s}, {"user", s}, {"assistant", s, s, {{s, s}, {s, s}}},
                                    {"tool", s}, {"tool", s}, {"assistant", s, s}, {"user", s}};
    };
    auto added_tokens = [](const Ids& ids) {
        Ids found;
        for (int id : ids)
            if (tokenizer().id(tokenizer().bytes(id)) == id) found.push_back(id);
        return found;
    };
    const Ids frame = added_tokens(render_chat(tokenizer(), messages("x"), {}, {"x"}));
    int names = 0;
    for (int id = 0; id < tokenizer().size(); id++) {
        std::string name(tokenizer().bytes(id));
        if (tokenizer().id(name) != id) continue;
        INFO(name);
        names++;
        Ids ids = render_chat(tokenizer(), messages(name), {}, {name});
        CHECK(added_tokens(ids) == frame);
        CHECK(tokenizer().decode(ids, false) == render_text(messages(name), {}, {name}));
    }
    CHECK(names == 26);
}

TEST_CASE("content in parts, or none") {
    auto text = [](std::string_view json) { return render_text(messages_of(json), {true, false}); };
    CHECK(text(R"([{"role":"user","content":[{"type":"text","text":"a\n"},{"type":"text","text":"漢"}]}])") ==
          "<|im_start|>user\na\n漢<|im_end|>\n");
    CHECK(text(R"([{"role":"user","content":[]}])") == "<|im_start|>user\n<|im_end|>\n");
    std::string call = R"("tool_calls":[{"function":{"name":"f","arguments":{}}}]}])";
    std::string called = "<|im_start|>assistant\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n"
                         "</tool_call><|im_end|>\n";
    CHECK(text(R"([{"role":"assistant","content":null,)" + call) == called);
    CHECK(text(R"([{"role":"assistant",)" + call) == called);
    // the last of duplicate keys counts, as in Python; keys that the template does not know are ignored
    CHECK(text(R"([{"role":"tool","role":"user","content":"a","content":"b","name":1,"tool_calls":1}])") ==
          "<|im_start|>user\nb<|im_end|>\n");
}

TEST_CASE("refused by name") {
    struct { std::string_view json, error; } cases[] = {
        {R"({})", "messages: not a list"},
        {R"([])", "messages: a conversation needs at least one"},
        {R"([1])", "messages[0]: no role"},
        {R"([{"content":"a"}])", "messages[0]: no role"},
        {R"([{"role":1,"content":"a"}])", "messages[0]: no role"},
        {R"([{"role":"user","content":"a"},{"role":"developer","content":"a"}])",
         "messages[1]: unknown role \"developer\""},
        {R"([{"role":"","content":"a"}])", "messages[0]: unknown role \"\""},
        {R"([{"role":"User","content":"a"}])", "messages[0]: unknown role \"User\""},
        {R"([{"role":"a\nb","content":"a"}])", "messages[0]: unknown role \"a\\nb\""},       // one line
        {R"([{"role":"a role of more than forty bytes: not shown","content":""}])",
         "messages[0]: unknown role \"...\""},
        {R"([{"role":"user"}])", "messages[0].content: missing"},
        {R"([{"role":"user","content":null}])", "messages[0].content: neither a string nor a list of parts"},
        {R"([{"role":"tool","content":{}}])", "messages[0].content: neither a string nor a list of parts"},
        {R"([{"role":"assistant","content":1}])",
         "messages[0].content: neither a string nor a list of parts"},
        {R"([{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url","image_url":{}}]}])",
         "messages[0].content[1]: type \"image_url\" is not supported, only \"text\""},
        {R"([{"role":"user","content":["a"]}])",
         "messages[0].content[0]: type \"\" is not supported, only \"text\""},
        {R"([{"role":"user","content":[{"type":"text"}]}])", "messages[0].content[0]: a part without text"},
        {R"([{"role":"assistant","content":"","reasoning_content":1}])",
         "messages[0].reasoning_content: not a string"},
        {R"([{"role":"assistant","content":"","tool_calls":{}}])", "messages[0].tool_calls: not a list"},
        {R"([{"role":"assistant","tool_calls":[1]}])",
         "messages[0].tool_calls[0]: a tool call without a name"},
        {R"([{"role":"assistant","tool_calls":[{"name":"f","arguments":""},{"function":{"arguments":""}}]}])",
         "messages[0].tool_calls[1]: a tool call without a name"},
        {R"([{"role":"assistant","tool_calls":[{"function":{"name":"f"}}]}])",
         "messages[0].tool_calls[0]: a tool call without arguments"},
    };
    for (auto& c : cases) {
        INFO(c.json);
        CHECK(error_of([&] { render_text(messages_of(c.json)); }) == c.error);
    }
    auto tools_error = [](std::string_view json) {
        sj::Doc doc;
        REQUIRE(sj::parse(doc, json) == "");
        return error_of([&] { tools_from_json(doc.root()); });
    };
    CHECK(tools_error("{}") == "tools: not a list");
    CHECK(tools_error("[{}, \"f\"]") == "tools[1]: not an object");
    CHECK(tools_error("null") == "");
}

TEST_CASE("a vocabulary without the template's tokens") {
    // tokenizer.bin with another name for one token
    MappedFile file("tokenizer.bin");
    std::string bytes(file.text()), path = "/tmp/qwen3_test_chat_" + std::to_string(getpid()) + ".bin";
    size_t at = bytes.rfind("<think>");
    REQUIRE(at != bytes.npos);
    bytes.replace(at, 7, "<thunk>");
    OutputFile out(path);
    out.write(bytes);
    out.commit();
    Tokenizer other(path);
    unlink(path.c_str());
    CHECK(error_of([&] { render_chat(other, {{"user", "a"}}); }) ==
          "the chat template needs <think>, which the tokenizer has not");
    CHECK(render_chat(other, {{"user", "a"}}, {true}).size() == 9);     // only what is needed is asked for
}

TEST_CASE("the template's name") {
    // Datasets carry it. It may change only when the template's text does.
    CHECK(template_hash() == 0x9d2f2b75496f3d53);
}
