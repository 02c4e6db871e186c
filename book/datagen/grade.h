// book/datagen/grade.h: `datagen grade`: tests a server as a course's judge does, and grades the answers. By libcurl.
//
//   GET URL/                          {"status": "ok"}: one question per request; {"status": "batch"}: all in one;
//                                     {"status": "initializing"}, 503 and anything else: not ready yet
//   POST URL/predict {"prompt": ...}  {"response": ...}: a text, or in batch mode lists of the same length and order
#pragma once
#include "book/arguments.h"

namespace book {

// 0: passed, 1: failed. Without libcurl: Error.
int run_grade(const Arguments& a);

} // namespace book
