// forms.h: the forms that constrain answers, and the tools that answers may call.
#pragma once
#include "server/api/request.h"
#include <memory>

namespace server {

// response_format, structured_outputs and vLLM's older guided_*: at most one of them.
std::shared_ptr<Automaton> form_from_json(const Service& service, const Fields& f);

// Adds tools, tool_choice and parallel_tool_calls to the job.
void add_tools(const Service& service, const Fields& f, const Ask& ask, Job& job);

} // namespace server
