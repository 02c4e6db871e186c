// form/tools.h: functions that a model may call, as OpenAI's API has them and Qwen3 writes them:
//     <tool_call>\n{"name": "weather", "arguments": {"city": "Bremen"}}\n</tool_call>
// What a request offers, the grammar of the calls, and a call from its text. The two markers are tokens of their own;
// text that looks like them is text.
#pragma once
#include "form/grammar.h"
#include "sj.h"
#include <cstddef>
#include <set>
#include <string>
#include <vector>

struct Tool {
    std::string name;
    sj::Value parameters; // a JSON schema, or missing: any object
    bool strict;          // arguments must keep to it
};

constexpr size_t MAX_TOOLS = 128, MAX_TOOL_NAME = 64;

std::vector<Tool> read_tools(sj::Value list); // throws Error

constexpr const char *CALL_OPEN = "<tool_call>", *CALL_CLOSE = "</tool_call>"; // the markers

// One call and no more, or several. All arguments keep to their schema.
Grammar grammar_of_calls(const std::vector<Tool>& tools, bool several);
// A call whose first marker is there already. Arguments of the strict keep to their schema.
Grammar grammar_of_call_body(const std::vector<Tool>& tools);

// What is told of a call: its name first, then its arguments, whole or in parts.
struct CallPart {
    std::string name; // not empty: a call begins
    std::string arguments;
};

// The text of a call as it comes.
struct CallText {
    std::string text{};
    bool begun = false;   // its name has been told
    size_t told = 0;      // up to here

    // As much as can be told now of a call that keeps to grammar_of_calls.
    void tell(std::vector<CallPart>& parts);
    // The whole of a call that nothing has kept in form. False: it is none, or of none of these functions.
    bool read(const std::set<std::string>& names, std::vector<CallPart>& parts) const;
};
