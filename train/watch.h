// train/watch.h: a run shown live in a browser: --watch PORT.
//
//   Watch watch(8080);               http://127.0.0.1:8080/ from here on: train/page/live.html
//   watch.add("{\"loss\": 2.5}");    an event for every page, also for those that are opened later
//   the destructor                   ends the pages' streams and closes the port
//
// The page is static. All that it shows comes in events, each an object in JSON on one line: the lines of
// trainer_log.jsonl and trainer_answers.jsonl (train/log.h), and those of train/run.cpp. All events are one text in
// memory. A stream (text/event-stream) is a place in this text: a browser that does not read costs the trainer nothing.
#pragma once
#include <memory>
#include <string>

extern const bool can_watch; // false: built without libmicrohttpd

class Watch {
  public:
    struct Server;

    explicit Watch(int port); // 0: a free one. Throws Error
    Watch(const Watch&) = delete;
    ~Watch();

    int port() const;
    void add(const std::string& json); // never waits for a browser
    void end(const std::string& text, bool failed); // the last event; the destructor's, if there was none, is a failure

  private:
    std::unique_ptr<Server> server;
};
