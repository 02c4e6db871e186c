// form/tools.h: functions that a model may call, as OpenAI's API has them and Qwen3 writes them:
//     <tool_call>\n{"name": "weather", "arguments": {"city": "Bremen"}}\n</tool_call>
// Reads the tools of a request, builds the grammar of calls, and reads a call from its text. The two markers are single
// tokens; text that looks like them is text.
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
    bool strict;          // arguments must follow the schema
};

constexpr size_t MAX_TOOLS = 128, MAX_TOOL_NAME = 64;

std::vector<Tool> read_tools(sj::Value list); // throws Error

constexpr const char *CALL_OPEN = "<tool_call>", *CALL_CLOSE = "</tool_call>"; // the markers

// One call only, or several. All arguments follow their schema.
Grammar grammar_of_calls(const std::vector<Tool>& tools, bool several);
// A call after its opening marker. The arguments of strict tools follow their schema.
Grammar grammar_of_call_body(const std::vector<Tool>& tools);

// A part of a call as it is reported: its name first, then its arguments, whole or in parts.
struct CallPart {
    std::string name; // not empty: a call begins
    std::string arguments;
};

// The text of a call as it arrives.
struct CallText {
    std::string text{};
    bool begun = false;   // its name has been reported
    size_t told = 0;      // bytes reported

    // Reports as much as is final of a call that follows grammar_of_calls.
    void tell(std::vector<CallPart>& parts);
    // Reads a complete call that was not constrained. False: it is invalid, or names none of these functions.
    bool read(const std::set<std::string>& names, std::vector<CallPart>& parts) const;
};
