/* train/tensorboard.h: scalars of a training run in an event file, as TensorBoard reads it.

   A file of records (TFRecord): u64 length; u32 masked CRC-32C of these 8 bytes; the data; u32 masked CRC-32C of the
   data. Little-endian. Each datum is an Event, a protocol buffer; the fields that are written, by their numbers:
       Event    1 double wall_time  2 int64 step  3 string file_version  5 Summary  7 SessionLog {1 status: START = 1}
       Summary  1 Value, repeated: {1 string tag, 2 float simple_value}
   https://github.com/tensorflow/tensorboard/tree/master/tensorboard/compat/proto: event.proto, summary.proto
*/
#pragma once
#include "base/appended_file.h"
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// CRC-32C (Castagnoli) of the bytes.
uint32_t crc32c(std::string_view bytes);
// The bytes as a record.
std::string event_record(std::string_view data);
// A serialised Event. time: seconds since 1970.
std::string scalar_event(double time, int64_t step, const std::vector<std::pair<std::string, float>>& scalars);

// An event file in a folder, of a name that no other file has: events.out.tfevents.SECONDS.MICROSECONDS, so that the
// files of a resumed run sort by time.
class EventFile {
    AppendedFile file;

    void write(std::string_view event);

  public:
    static constexpr const char* NAME = "events.out.tfevents."; // begins every event file's name

    // Throws Error if the file cannot be created. TensorBoard hides what other files have of the steps after `steps`.
    EventFile(const std::string& folder, int64_t steps);
    EventFile(const EventFile&) = delete;

    // The numbers of a line of the log, at its current_steps: eval_NAME as eval/NAME, others as train/NAME. Counts of
    // steps and the clock's texts are left out. Throws Error if the file cannot be written.
    void add(const std::string& line);
};
