// pace.cpp: estimates from the steps so far.
#include "server/engine/pace.h"
#include <algorithm>

namespace server {

size_t PromptPace::tokens(size_t least, size_t most) const {
    if (since >= STALE) return 0;
    const double fit = each > 0 ? (STRETCH - 1) * alone / each : 0;
    return fit > (double)most ? most : std::max(std::min(least, most), (size_t)fit);
}

void PromptPace::learn(size_t singles, size_t prompts, double took) {
    if (singles) since = prompts ? since + 1 : 0;
    const double more = std::max(took - alone, took / 100) / (double)std::max<size_t>(prompts, 1);
    if (!prompts) { // a longer time counts only when seen twice; a GPU's first step is slow
        const double sure = std::min(took, last == 0 ? took : last);
        alone = alone == 0 ? took : std::min((alone + sure) / 2, 2 * took), last = took;
    } else if (each == 0) {
        each = more;
    } else if (singles) {
        each += (more - each) / 8;
    }
}

} // namespace server
