// Thoughts are told apart by the prompt that the model's own chat template writes. The models here say given texts
// (tests/scripted.h): as Qwen3 does, as its 2507 models that never think or always do.
#include "model/chat_template.h"
#include "model/options.h"
#include "model/session.h"
#include "model/weights.h"
#include "tests/common.h"
#include "tests/scripted.h"

static const char VOCABULARY[] = "tests/fixtures/tiny/tokenizer.bin";
static const std::string BODY = R"({%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}{%- endfor %})",
                         NO_THOUGHT = BODY + R"({%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %})",
                         ALWAYS = BODY + R"({%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %})",
                         ASKED = BODY + R"({%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- if enable_thinking is defined and enable_thinking is false %}
                                 {{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %})",
                         OPENED = BODY + R"({%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- if enable_thinking is defined and enable_thinking is false %}
                                 {{- '<think>\n\n</think>\n\n' }}{%- else %}{{- '<think>\n' }}{%- endif %}{%- endif %})";

TEST_CASE("a template's thoughts and its system prompt are read from its texts; one that writes others is told") {
    Tokenizer t("tokenizer.bin");
    auto prompt = [&](const std::string& jinja, bool thinking) {
        t.chat = ChatStyle::of(jinja);
        CHECK(t.chat.strange == "");
        const std::string all = t.decode(render_chat(t, {{"user", "u"}}, {thinking, true}), false), begin = "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n";
        REQUIRE(all.compare(0, begin.size(), begin) == 0);
        return all.substr(begin.size());
    };
    const std::string empty = "<think>\n\n</think>\n\n", open = "<think>\n";
    CHECK(prompt("", false) == empty); CHECK(prompt("", true) == "");
    CHECK(prompt(ASKED, false) == empty); CHECK(prompt(ASKED, true) == "");
    CHECK(prompt(NO_THOUGHT, false) == ""); CHECK(prompt(NO_THOUGHT, true) == "");
    CHECK(prompt(ALWAYS, false) == open); CHECK(prompt(ALWAYS, true) == open);
    CHECK(prompt(OPENED, false) == empty); CHECK(prompt(OPENED, true) == open);
    auto may = [&](const std::string& jinja, bool asked) { return t.chat = ChatStyle::of(jinja), may_think(t, {asked, true}); };
    CHECK((may(ASKED, true) && !may(ASKED, false) && !may(NO_THOUGHT, true) && may(ALWAYS, false) && may(OPENED, true) && !may(OPENED, false)));
    CHECK(!may_think(t, {true, false, true})); // goes on with a message

    // Turns of the assistant: of a model that never thinks they are text like any.
    const std::vector<Message> turns = {{"user", "u"}, {"assistant", "<think>\nt\n</think>\n\na"}};
    auto said = [&](const std::string& jinja) {
        const ChatStyle style = ChatStyle::of(jinja);
        std::string all;
        for (auto& part : render(turns, {false, false}, {}, style).parts) all += part.text;
        return all.substr(all.find("assistant\n") + 10);
    };
    CHECK(said(NO_THOUGHT) == "<think>\nt\n</think>\n\na<|im_end|>\n");
    CHECK(said(ALWAYS) == "<think>\nt\n</think>\n\na<|im_end|>\n");
    t.chat = ChatStyle::of(NO_THOUGHT);
    const std::vector<int> ids = render_chat(t, turns, {false, false});
    CHECK(std::count(ids.begin(), ids.end(), t.id("<think>")) == 0); // a caller's text

    const std::string system = R"({%- if messages[0].role != 'system' %}{{- '<|im_start|>system\nYou are "Bo".<|im_end|>\n' }}{%- endif %})";
    t.chat = ChatStyle::of(system + NO_THOUGHT);
    CHECK(t.chat.strange == "");
    CHECK(t.decode(render_chat(t, {{"user", "u"}}), false) == "<|im_start|>system\nYou are \"Bo\".<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n");
    CHECK(t.decode(render_chat(t, {{"system", "s"}, {"user", "u"}}), false) == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n");
    CHECK_THROWS_WITH_AS(render_chat(t, {{"nobody", "u"}}), "messages[0]: unknown role \"nobody\"", Error);

    CHECK(ChatStyle::of("{{ '[INST] ' + content }}" + NO_THOUGHT).strange == "[INST] ");
    CHECK(ChatStyle::of(NO_THOUGHT + R"({{ "<|im_start|>critic\n" }})").strange == "<|im_start|>critic\n");
    CHECK(ChatStyle::of(BODY + R"({%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{%- endif %})").strange != "");
    CHECK(ChatStyle::of("{{ content }}").strange == "{{ content }}"); // no turns
    for (const char* broken : {"{{", "{{ '", "{{ 'a\\", "{{ 'a' + \"b", "}}", "{{}}"}) ChatStyle::of(broken);
}

// The model's answer to "Hi", given the text of its template.
static Generation said(const std::string& jinja, bool thinking, const std::vector<std::string>& stops = {}) {
    static const Tokenizer t(VOCABULARY);
    const Scratch s;
    const std::vector<int> turn = {t.id("<|im_start|>")}, assistant = t.encode("assistant\n", false), breaks = t.encode("\n\n", false);
    auto joined = [](std::initializer_list<std::vector<int>> parts) {
        std::vector<int> all;
        for (auto& part : parts) all.insert(all.end(), part.begin(), part.end());
        return all;
    };
    const std::vector<int> open = {t.id("<think>")}, close = {t.id("</think>")}, line = t.encode("\n", false);
    const std::vector<int> thought = joined({t.encode("See: 6 x 7.", false), line, close, breaks}), answer = t.encode("It is 42. See: yes.", false);
    std::vector<Script> scripts = {{joined({open, breaks, close, breaks}), answer}};
    const ChatStyle style = ChatStyle::of(jinja);
    const std::vector<int> prompt = joined({turn, assistant}), opened = joined({turn, assistant, open, line});
    scripts.push_back(style.opens ? Script{opened, joined({thought, answer})} : Script{prompt, joined({open, line, thought, answer})});
    write_scripted(s / "m", t, scripts, 7);
    write_file(s / "m/chat_template.jinja", jinja);
    write_model(ModelFile(s / "m"), s / "m.bin"); // which keeps the template
    CHECK(ModelFile(s / "m").chat_template == jinja);
    const ModelFile file(s / "m.bin");
    const Tokenizer own = tokenizer_of(VOCABULARY, file);
    const Weights<float> weights(file);
    Session<float> session(file.config, weights, 256);
    const std::vector<int> ids = render_chat(own, {{"user", "Hi"}}, {thinking, true});
    session.feed(ids);
    Generation g;
    g.sampling.temperature = 0, g.stops = stops, g.max_tokens = 100, g.in_thought = opens_thought(own, ids);
    generate(session, &own, g, [](std::string_view) {});
    return g;
}

TEST_CASE("thoughts by the prompt: asked for, always, never; stop strings look at the answer only") {
    const std::string thought = "<think>\nSee: 6 x 7.\n</think>\n\n", answer = "It is 42. See: yes.";
    CHECK(said(ASKED, true).text == thought + answer);
    CHECK(said(ASKED, false).text == answer);
    CHECK(said(ALWAYS, false).text == thought + answer);
    CHECK(said(OPENED, true).text == thought + answer);
    CHECK(said(NO_THOUGHT, false).text == thought + answer); // which is no thought, but what it says
    for (auto& [jinja, thinking] : {std::pair(ASKED, true), {ALWAYS, false}, {OPENED, true}}) {
        const Generation g = said(jinja, thinking, {"See:"});
        CHECK(g.text == thought + "It is 42. ");
        CHECK(g.finish == std::string("stop"));
    }
    CHECK(said(ASKED, false, {"See:"}).text == "It is 42. ");
    CHECK(said(NO_THOUGHT, false, {"See:"}).text == "<think>\n");
}
