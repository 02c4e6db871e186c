// openapi.cpp: the document. It holds what clients and testers need to form requests; docs/server.md explains the
// fields. {{version}} is filled in.
#include "qwen3.h"
#include "server/http/openapi.h"
#include <string_view>

namespace server {

static const char OPENAPI[] = R"json({
"openapi": "3.1.0",
"info": {"title": "serve", "version": "{{version}}", "description": "OpenAI's and Anthropic's APIs for a Qwen3 model and its adapters."},
"security": [{}, {"key": []}, {"x-api-key": []}],
"paths": {
  "/v1/chat/completions": {"post": {
    "requestBody": {"required": true, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Chat"}}}},
    "responses": {"200": {"description": "the answers, or a stream of events", "content": {
        "application/json": {"schema": {"type": "object", "required": ["id", "object", "created", "model", "choices", "usage"], "properties": {
          "object": {"const": "chat.completion"}, "usage": {"$ref": "#/components/schemas/Usage"}, "choices": {"type": "array", "minItems": 1, "items": {
            "type": "object", "required": ["index", "message", "finish_reason"], "properties": {"finish_reason": {"enum": ["stop", "length", "tool_calls"]},
              "message": {"type": "object", "required": ["role", "content"], "properties": {"role": {"const": "assistant"}, "content": {"type": ["string", "null"]}}}}}}}}},
        "text/event-stream": {}}}, "default": {"$ref": "#/components/responses/Error"}}}},
  "/v1/completions": {"post": {
    "requestBody": {"required": true, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Completion"}}}},
    "responses": {"200": {"description": "the answers, or a stream of events", "content": {
        "application/json": {"schema": {"type": "object", "required": ["id", "object", "choices", "usage"], "properties": {
          "object": {"const": "text_completion"}, "usage": {"$ref": "#/components/schemas/Usage"},
          "choices": {"type": "array", "minItems": 1, "items": {"type": "object", "required": ["index", "text", "finish_reason"], "properties": {"text": {"type": "string"}}}}}}},
        "text/event-stream": {}}}, "default": {"$ref": "#/components/responses/Error"}}}},
  "/v1/responses": {"post": {
    "requestBody": {"required": true, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Response"}}}},
    "responses": {"200": {"description": "a response, or a stream of events", "content": {
        "application/json": {"schema": {"type": "object", "required": ["id", "object", "status", "output", "usage"], "properties": {
          "object": {"const": "response"}, "status": {"enum": ["completed", "incomplete"]}, "store": {"const": false}, "output": {"type": "array", "items": {
            "type": "object", "required": ["type", "id"], "properties": {"type": {"enum": ["message", "reasoning", "function_call"]}}}}}}},
        "text/event-stream": {}}}, "default": {"$ref": "#/components/responses/Error"}}}},
  "/v1/messages": {"post": {
    "requestBody": {"required": true, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Message"}}}},
    "responses": {"200": {"description": "a message, or a stream of events", "content": {
        "application/json": {"schema": {"type": "object", "required": ["id", "type", "role", "content", "stop_reason", "usage"], "properties": {
          "type": {"const": "message"}, "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]}}}},
        "text/event-stream": {}}}, "default": {"$ref": "#/components/responses/MessageError"}}}},
  "/v1/messages/count_tokens": {"post": {
    "requestBody": {"required": true, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Conversation"}}}},
    "responses": {"200": {"description": "how many", "content": {"application/json": {"schema": {"type": "object", "required": ["input_tokens"],
        "properties": {"input_tokens": {"type": "integer"}}}}}}, "default": {"$ref": "#/components/responses/MessageError"}}}},
  "/v1/embeddings": {"post": {
    "requestBody": {"required": true, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Embeddings"}}}},
    "responses": {"200": {"description": "vectors", "content": {"application/json": {"schema": {"type": "object", "required": ["object", "data", "model", "usage"], "properties": {
        "object": {"const": "list"}, "data": {"type": "array", "minItems": 1, "items": {"type": "object", "required": ["object", "index", "embedding"], "properties": {
          "object": {"const": "embedding"}, "index": {"type": "integer"}, "embedding": {"type": ["array", "string"]}}}}}}}}}, "default": {"$ref": "#/components/responses/Error"}}}},
  "/v1/rerank": {"post": {"requestBody": {"$ref": "#/components/requestBodies/Rerank"},
    "responses": {"200": {"$ref": "#/components/responses/Ranking"}, "default": {"$ref": "#/components/responses/Error"}}}},
  "/v2/rerank": {"post": {"requestBody": {"$ref": "#/components/requestBodies/Rerank"},
    "responses": {"200": {"$ref": "#/components/responses/Ranking"}, "default": {"$ref": "#/components/responses/Error"}}}},
  "/rerank": {"post": {"requestBody": {"$ref": "#/components/requestBodies/Rerank"},
    "responses": {"200": {"$ref": "#/components/responses/Ranking"}, "default": {"$ref": "#/components/responses/Error"}}}},
  "/tokenize": {"post": {
    "requestBody": {"required": true, "content": {"application/json": {"schema": {"type": "object", "anyOf": [{"required": ["prompt"]}, {"required": ["messages"]}],
        "properties": {"prompt": {"type": ["string", "null"]}, "add_special_tokens": {"type": ["boolean", "null"]}, "messages": {"oneOf": [{"type": "null"}, {"$ref": "#/components/schemas/Messages"}]}}}}}},
    "responses": {"200": {"description": "ids", "content": {"application/json": {"schema": {"type": "object", "required": ["tokens", "count"],
        "properties": {"tokens": {"type": "array", "items": {"type": "integer"}}, "count": {"type": "integer"}}}}}}, "default": {"$ref": "#/components/responses/Error"}}}},
  "/detokenize": {"post": {
    "requestBody": {"required": true, "content": {"application/json": {"schema": {"type": "object", "required": ["tokens"],
        "properties": {"tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}}}}}}},
    "responses": {"200": {"description": "text", "content": {"application/json": {"schema": {"type": "object", "required": ["prompt"], "properties": {"prompt": {"type": "string"}}}}}},
      "default": {"$ref": "#/components/responses/Error"}}}},
  "/convert": {"post": {"parameters": [{"name": "name", "in": "query", "required": true, "schema": {"type": "string", "minLength": 1, "maxLength": 200}}],
    "requestBody": {"required": true, "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary", "minLength": 1}}}},
    "responses": {"200": {"description": "the text of a document", "content": {"application/json": {"schema": {"type": "object", "required": ["name", "text"],
        "properties": {"name": {"type": "string"}, "text": {"type": "string"}}}}}}, "default": {"$ref": "#/components/responses/Error"}}}},
  "/tokenizer_info": {"get": {"responses": {"200": {"description": "special tokens and chat template", "content": {"application/json": {"schema": {"type": "object", "required": ["tokenizer_class", "eos_token"],
      "properties": {"tokenizer_class": {"type": "string"}, "bos_token": {"type": "null"}, "eos_token": {"type": ["string", "null"]}, "pad_token": {"type": ["string", "null"]}, "chat_template": {"type": "string"}}}}}}, "default": {"$ref": "#/components/responses/Error"}}}},
  "/v1/models": {"get": {"responses": {"200": {"description": "the model", "content": {"application/json": {"schema": {"type": "object", "required": ["data"],
      "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}}}}}}}, "default": {"$ref": "#/components/responses/Error"}}}},
  "/v1/models/{id}": {"get": {"parameters": [{"name": "id", "in": "path", "required": true, "schema": {"type": "string"}}],
    "responses": {"200": {"description": "the model", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Model"}}}}, "default": {"$ref": "#/components/responses/Error"}}}},
  "/v1/load_lora_adapter": {"post": {
    "requestBody": {"required": true, "content": {"application/json": {"schema": {"type": "object", "required": ["lora_name", "lora_path"], "additionalProperties": false,
        "properties": {"lora_name": {"type": "string", "minLength": 1, "maxLength": 128, "pattern": "^[A-Za-z0-9._/:@+-]+$"}, "lora_path": {"type": "string", "minLength": 1}, "load_inplace": {"enum": [false, null]}}}}}},
    "responses": {"200": {"description": "the adapter, a model now", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Model"}}}}, "default": {"$ref": "#/components/responses/Error"}}}},
  "/v1/unload_lora_adapter": {"post": {
    "requestBody": {"required": true, "content": {"application/json": {"schema": {"type": "object", "required": ["lora_name"], "additionalProperties": false, "properties": {"lora_name": {"type": "string", "minLength": 1}}}}}},
    "responses": {"200": {"description": "it is gone", "content": {"application/json": {"schema": {"type": "object", "required": ["deleted"]}}}}, "default": {"$ref": "#/components/responses/Error"}}}},
  "/v1/files": {
    "get": {"parameters": [{"$ref": "#/components/parameters/after"}, {"$ref": "#/components/parameters/limit"}, {"name": "purpose", "in": "query", "schema": {"type": "string"}}],
      "responses": {"200": {"description": "the files of the key", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/List"}}}}, "default": {"$ref": "#/components/responses/Error"}}},
    "post": {"requestBody": {"required": true, "content": {"multipart/form-data": {"schema": {"type": "object", "required": ["file", "purpose"], "additionalProperties": false, "properties": {
        "file": {"type": "string", "format": "binary", "minLength": 1}, "purpose": {"const": "batch"}}}}}},
      "responses": {"200": {"description": "the file", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/File"}}}}, "default": {"$ref": "#/components/responses/Error"}}}},
  "/v1/files/{id}": {"parameters": [{"$ref": "#/components/parameters/id"}],
    "get": {"responses": {"200": {"description": "the file", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/File"}}}}, "default": {"$ref": "#/components/responses/Error"}}},
    "delete": {"responses": {"200": {"description": "it is gone", "content": {"application/json": {"schema": {"type": "object", "required": ["deleted"]}}}}, "default": {"$ref": "#/components/responses/Error"}}}},
  "/v1/files/{id}/content": {"parameters": [{"$ref": "#/components/parameters/id"}],
    "get": {"responses": {"200": {"description": "its bytes", "content": {"application/octet-stream": {}}}, "default": {"$ref": "#/components/responses/Error"}}}},
  "/v1/batches": {
    "get": {"parameters": [{"$ref": "#/components/parameters/after"}, {"$ref": "#/components/parameters/limit"}],
      "responses": {"200": {"description": "the batches of the key", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/List"}}}}, "default": {"$ref": "#/components/responses/Error"}}},
    "post": {"requestBody": {"required": true, "content": {"application/json": {"schema": {"type": "object", "required": ["input_file_id", "endpoint", "completion_window"],
        "additionalProperties": false, "properties": {"input_file_id": {"type": "string"}, "endpoint": {"enum": ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]},
        "completion_window": {"const": "24h"}, "metadata": {"type": ["object", "null"], "additionalProperties": {"type": "string"}}}}}}},
      "responses": {"200": {"description": "the batch", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Batch"}}}}, "default": {"$ref": "#/components/responses/Error"}}}},
  "/v1/batches/{id}": {"parameters": [{"$ref": "#/components/parameters/id"}],
    "get": {"responses": {"200": {"description": "the batch", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Batch"}}}}, "default": {"$ref": "#/components/responses/Error"}}}},
  "/v1/batches/{id}/cancel": {"parameters": [{"$ref": "#/components/parameters/id"}],
    "post": {"requestBody": {"content": {"application/json": {}}},
      "responses": {"200": {"description": "the batch", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Batch"}}}}, "default": {"$ref": "#/components/responses/Error"}}}},
  "/predict": {"post": {
    "requestBody": {"required": true, "content": {"application/json": {"schema": {"type": "object", "required": ["prompt"], "properties": {"prompt": {"oneOf": [{"type": "string"},
        {"type": "array", "items": {"type": "string"}}]}}}}}},
    "responses": {"200": {"description": "a response, or a list of them", "content": {"application/json": {"schema": {"type": "object", "required": ["response"], "properties": {"response": {"oneOf": [
        {"type": "string"}, {"type": "array", "items": {"type": "string"}}]}}}}}}, "default": {"$ref": "#/components/responses/Error"}}}},
  "/": {"get": {"security": [], "responses": {"200": {"description": "the chat page, or the course's health", "content": {"text/html": {}, "application/json": {}}},
    "503": {"description": "loading or draining", "content": {"application/json": {}}}, "default": {"$ref": "#/components/responses/Error"}}}},
  "/temml.js": {"get": {"security": [], "responses": {"200": {"description": "draws the page's formulas", "content": {"text/javascript": {}}}, "default": {"$ref": "#/components/responses/Error"}}}},
  "/openapi.json": {"get": {"security": [], "responses": {"200": {"description": "this document", "content": {"application/json": {}}}, "default": {"$ref": "#/components/responses/Error"}}}},
  "/ping": {"get": {"security": [], "responses": {"200": {"description": "ready", "content": {"application/json": {}}}, "503": {"description": "loading or draining", "content": {"application/json": {}}},
    "default": {"$ref": "#/components/responses/Error"}}}},
  "/health": {"get": {"security": [], "responses": {"200": {"description": "ready", "content": {"application/json": {}}}, "503": {"description": "loading or draining", "content": {"application/json": {}}},
    "default": {"$ref": "#/components/responses/Error"}}}},
  "/version": {"get": {"security": [], "responses": {"200": {"description": "of the program", "content": {"application/json": {}}}, "default": {"$ref": "#/components/responses/Error"}}}},
  "/metrics": {"get": {"security": [], "responses": {"200": {"description": "for Prometheus", "content": {"text/plain": {}}}, "default": {"$ref": "#/components/responses/Error"}}}}
},
"components": {
  "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}, "x-api-key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"}},
  "parameters": {"id": {"name": "id", "in": "path", "required": true, "schema": {"type": "string"}},
    "after": {"name": "after", "in": "query", "schema": {"type": "string"}}, "limit": {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 10000}}},
  "requestBodies": {"Rerank": {"required": true, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Rerank"}, "examples": {
    "texts": {"value": {"query": "What is a warp?", "documents": ["A warp is 32 threads.", "A cat sleeps."]}},
    "objects": {"value": {"query": "线程束", "documents": [{"text": "线程束是32个线程。"}, {"text": ""}, {"text": "A warp."}], "top_n": 2, "return_documents": true, "instruct": "Find the definition"}}}}}}},
  "responses": {
    "Ranking": {"description": "the documents, the best first", "content": {"application/json": {"schema": {"type": "object", "required": ["id", "model", "results", "usage"], "properties": {
      "results": {"type": "array", "items": {"type": "object", "required": ["index", "relevance_score"], "properties": {"index": {"type": "integer"},
        "relevance_score": {"type": "number"}, "document": {"type": "object", "required": ["text"], "properties": {"text": {"type": "string"}}}}}}}}}}},
    "Error": {"description": "refused", "content": {"application/json": {"schema": {"type": "object", "required": ["error"], "properties": {"error": {
      "type": "object", "required": ["message", "type", "param", "code"], "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": {"type": ["string", "null"]}}}}}}}},
    "MessageError": {"description": "refused", "content": {"application/json": {"schema": {"type": "object", "required": ["type", "error", "request_id"], "properties": {"type": {"const": "error"},
      "error": {"type": "object", "required": ["type", "message"]}}}}}}},
  "schemas": {
    "Usage": {"type": "object", "required": ["prompt_tokens", "completion_tokens", "total_tokens"]},
    "Model": {"type": "object", "required": ["id", "object", "root", "parent", "max_model_len"], "properties": {"root": {"type": "string"}, "parent": {"type": ["string", "null"]}}},
    "List": {"type": "object", "required": ["object", "data", "has_more"], "properties": {"object": {"const": "list"}, "data": {"type": "array"}}},
    "File": {"type": "object", "required": ["id", "object", "bytes", "created_at", "filename", "purpose"]},
    "Batch": {"type": "object", "required": ["id", "object", "endpoint", "input_file_id", "status", "request_counts"]},
    "Messages": {"type": "array", "minItems": 1, "items": {"type": "object", "required": ["role", "content"], "properties": {
      "role": {"enum": ["system", "developer", "user", "assistant", "tool"]}, "content": {"type": "string"}}}},
    "Draws": {"type": "object", "properties": {
      "stream": {"type": ["boolean", "null"]}, "temperature": {"type": ["number", "null"], "minimum": 0, "maximum": 2}, "top_p": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
      "top_k": {"type": ["integer", "null"], "minimum": -1, "maximum": 2147483647}, "min_p": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
      "presence_penalty": {"type": ["number", "null"], "minimum": -2, "maximum": 2}, "frequency_penalty": {"type": ["number", "null"], "minimum": -2, "maximum": 2},
      "seed": {"type": ["integer", "null"], "minimum": -9223372036854775808, "maximum": 9223372036854775807}, "ignore_eos": {"type": ["boolean", "null"]}}},
    "Chat": {"allOf": [{"$ref": "#/components/schemas/Draws"}, {"type": "object", "required": ["messages"], "properties": {
      "messages": {"$ref": "#/components/schemas/Messages"}, "max_completion_tokens": {"type": ["integer", "null"], "minimum": 1, "maximum": 2147483647},
      "max_tokens": {"type": ["integer", "null"], "minimum": 1, "maximum": 2147483647}, "n": {"type": ["integer", "null"], "minimum": 1, "maximum": 128},
      "logprobs": {"type": ["boolean", "null"]}, "prompt_logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 20}, "tools": {"type": ["array", "null"], "maxItems": 128}, "response_format": {"type": ["object", "null"]},
      "documents": {"type": ["array", "null"], "maxItems": 64, "items": {"type": "object", "required": ["text"], "additionalProperties": false, "properties": {
        "title": {"type": ["string", "null"], "maxLength": 200}, "text": {"type": "string", "minLength": 1}}}},
      "use_documents": {"type": ["boolean", "null"]}}}]},
    "Completion": {"allOf": [{"$ref": "#/components/schemas/Draws"}, {"type": "object", "required": ["prompt"], "properties": {
      "prompt": {"oneOf": [{"type": "string", "minLength": 1}, {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}, {"type": "array", "minItems": 1, "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}}]},
      "max_tokens": {"type": ["integer", "null"], "minimum": 0, "maximum": 2147483647}, "n": {"type": ["integer", "null"], "minimum": 1, "maximum": 128},
      "echo": {"type": ["boolean", "null"]}, "logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 20}, "prompt_logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 20}}}]},
    "Embeddings": {"type": "object", "required": ["input"], "properties": {
      "input": {"oneOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        {"type": "array", "minItems": 1, "maxItems": 2048, "items": {"oneOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}]}}]},
      "encoding_format": {"type": ["string", "null"], "examples": ["float", "base64"]}, "dimensions": {"type": ["integer", "null"], "minimum": 1},
      "truncate_prompt_tokens": {"type": ["integer", "null"], "minimum": -1}, "add_special_tokens": {"type": ["boolean", "null"]}}},
    "Rerank": {"type": "object", "required": ["query", "documents"], "properties": {"query": {"type": "string", "minLength": 1},
      "documents": {"type": "array", "minItems": 1, "maxItems": 2048, "items": {"oneOf": [{"type": "string"},
        {"type": "object", "required": ["text"], "properties": {"text": {"type": "string"}}}]}},
      "top_n": {"type": ["integer", "null"], "minimum": 0, "maximum": 2147483647}, "return_documents": {"type": ["boolean", "null"]},
      "instruct": {"type": ["string", "null"]}, "truncate_prompt_tokens": {"type": ["integer", "null"], "minimum": -1}}},
    "Response": {"allOf": [{"$ref": "#/components/schemas/Draws"}, {"type": "object", "required": ["input"], "properties": {
      "input": {"oneOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": {"type": "object"}}]}, "instructions": {"type": ["string", "null"]},
      "max_output_tokens": {"type": ["integer", "null"], "minimum": 1, "maximum": 2147483647}, "store": {"enum": [false, null]}, "previous_response_id": {"type": "null"},
      "use_documents": {"type": ["boolean", "null"]}}}]},
    "Message": {"allOf": [{"$ref": "#/components/schemas/Conversation"}, {"type": "object", "required": ["max_tokens"], "properties": {
      "max_tokens": {"type": "integer", "minimum": 1, "maximum": 2147483647}}}]},
    "Conversation": {"allOf": [{"$ref": "#/components/schemas/Draws"}, {"type": "object", "required": ["messages"], "properties": {
      "messages": {"type": "array", "minItems": 1, "items": {"type": "object", "required": ["role", "content"], "properties": {
        "role": {"enum": ["user", "assistant", "system"]}, "content": {"type": ["string", "array"]}}}},
      "max_tokens": {"type": ["integer", "null"], "minimum": 1, "maximum": 2147483647}, "system": {"type": ["string", "array", "null"]},
      "stop_sequences": {"type": ["array", "null"], "maxItems": 16, "items": {"type": "string", "minLength": 1, "maxLength": 128}},
      "use_documents": {"type": ["boolean", "null"]}}}]}
  }
}})json";

std::string openapi_document() {
    std::string all = OPENAPI;
    const std::string_view place = "{{version}}";
    return all.replace(all.find(place), place.size(), std::to_string(QWEN3_VERSION));
}

} // namespace server
