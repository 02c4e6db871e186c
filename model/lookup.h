// model/lookup.h: prompt lookup. The next tokens have often occurred before: in the prompt, in documents, in the answer
// so far. LookUp finds earlier occurrences of the latest tokens, and proposes the tokens that followed them. One step
// of `forward` computes them together with the due token. The next tokens are sampled as always; as long as a sampled
// token equals the proposed one, its logits are already computed. So only the time changes (Saxena, "Prompt lookup
// decoding", 2023), if a row's bits do not depend on the other rows of its batch.
//
// Whether it pays: a step of several tokens takes longer, and proposals may be wrong. LookUp measures the steps, counts
// correct proposals after short and after long matches, and proposes the number of tokens with the highest expected
// tokens a second. It spends at most the time saved so far plus 1% of the answer's time.
//
//     begin      an answer begins after these ids
//     propose    the ids to compute beside the due one
//     computed   the time of a step of so many tokens
//     judged     whether the next proposed id equals the sampled one
// On a GPU steps are launched before the tokens of earlier steps are known, and a proposal has to wait until these have
// arrived:
//     foreseen   whether the awaited id is the one proposed for its place
//     came       when a step's tokens arrived, instead of `computed`
//     paused     the device computes something else
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

// Earlier occurrences of the last two ids of a list. The positions of a pair of ids are a chain, the latest first;
// pairs with the same hash share a chain, at the cost of one comparison.
class PairIndex {
    static constexpr int LOOKS = 16, LONGEST = 16; // positions that are looked at; ids that are compared at each
    int bits = 0;
    std::vector<int> newest;  // (2^bits) by hash: the latest position of a pair's second id, or -1
    std::vector<int> earlier; // (ids) the next one of the chain

    size_t place(const std::vector<int>& ids, size_t at) const;

  public:
    struct Match {
        size_t next = 0;   // position of the id that followed
        int length = 0;    // ids before it that are the same as the last ones; 0: none is known
    };

    // Adds the new ids at the end of `ids`, whose earlier part is unchanged.
    void grow(const std::vector<int>& ids);
    void clear() { newest.clear(), earlier.clear(); }

    // The longest match with the end of `ids`, all of which are known; of equal ones the latest.
    Match find(const std::vector<int>& ids) const;
};

// The minimum of the last few times of an operation: delays by other programs do not count.
class RecentTimes {
    double times[5] = {};
    int count = 0;

  public:
    void add(double time) { times[count++ % 5] = time; }
    double least() const { return count ? *std::min_element(times, times + std::min(count, 5)) : 0; } // 0: not known
};

struct LookUp {
    static constexpr int MOST = 7;
    int most = 0;            // tokens that are proposed at once, up to MOST; 0: none
    bool always = false;     // whether it pays or not: for tests
    size_t proposed = 0, right = 0; // of the answer: tokens

    void begin(const std::vector<int>& ids, double time);

    // At most `room` ids that may follow `ids`.
    std::vector<int> propose(const std::vector<int>& ids, size_t room);

    // The time of a step of so many tokens, the due one and the proposed ones; or of each of `times` such steps.
    void computed(size_t tokens, double time, int times = 1);
    // The tokens of a step of so many tokens arrived `now`. It was launched at `started` (s); `from_idle`: while no
    // step was under way, as is always so for proposed tokens: a single token took longer then. Other steps are timed
    // several at a time, since their arrival depends on the caller.
    void came(size_t tokens, double now, double started, bool from_idle);
    void paused() { run_since = 0; }
    void foreseen(bool is_right);
    void judged(bool is_right);

  private:
    PairIndex index;
    RecentTimes steps[MOST + 2];       // by tokens
    double won = 0, taken = 0;         // s of this answer; `taken`: the estimate without lookup, with its prompt
    double run_since = 0;              // s: since then `run` tokens came alone and without a pause; 0: none did
    int run = 0;
    int kind = 0;                      // of the last match: short, middle, long
    size_t passed = 0;                 // consecutive matches without a proposal; after 64 the times are doubted
    double tried[3] = {}, hit[3] = {}; // by kind: proposed tokens that were judged

    void waited(double time);
    // Expected time of a step with n proposed tokens. If none was measured: scaled from the largest measured step;
    // before that, each further token counts as a quarter of a step.
    double expected_time(int n) const;
    // How many tokens of up to n are worth a try.
    size_t number(int n);
};
