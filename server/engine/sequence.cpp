// sequence.cpp: makes a sequence of a job.
#include "server/engine/sequence.h"

namespace server {

Sequence::Sequence(Job&& j, const Tokenizer& t, uint64_t arrival)
    : job(std::move(j)), speech(t, job), ids(std::exchange(job.prompt, {})), prompt(ids.size()),
      arrival(arrival) {
    if (job.form) matcher = std::make_unique<Matcher>(job.form);
}

} // namespace server
