// model/lookup.h: prompt lookup. What comes next has often been said before: in the prompt, in documents, in the answer so
// far. LookUp finds where the latest tokens stood before, and proposes those that followed. They are computed together
// with the token that is due, in one step of `forward`; the next tokens are drawn as always, and as long as what is
// drawn is what was proposed, its logits are there already. So nothing changes but the time (Saxena, "Prompt lookup
// decoding", 2023), if a row's bits do not depend on the other rows of its batch.
//
// Whether it pays: a step of several tokens takes longer, and what was proposed may be wrong. LookUp measures the
// steps, counts what was right after short and after long matches, and proposes the number of tokens that is expected
// to bring the most tokens a second; it stakes no more time than it has won, and a hundredth of what the answer took so
// far.
//
//     begin      an answer begins after these ids
//     propose    the ids to compute beside the one that is due
//     computed   how long a step of so many tokens took
//     judged     whether the next proposed id was the one that was drawn
// On a GPU steps are launched before the tokens of those before are known, and a proposal has to wait until these have
// come:
//     foreseen   whether the id that was awaited was the one proposed for its place
//     came       when a step's tokens came, instead of `computed`
//     paused     something else is computed
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

// Where the last two ids of a list stood before. The positions of a pair of ids are a chain, the latest first; pairs
// with the same hash share one, which costs a look only.
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

    // Takes in what is new at the end of `ids`, which begin as they did.
    void grow(const std::vector<int>& ids);
    void clear() { newest.clear(), earlier.clear(); }

    // The longest match with the end of `ids`, all of which are known; of equal ones the latest.
    Match find(const std::vector<int>& ids) const;
};

// The least of the last times that something took: what other programs held up does not count.
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

    // A step of so many tokens, the one that was due and the proposed ones; or `times` such steps, each.
    void computed(size_t tokens, double time, int times = 1);
    // A step of so many tokens came `now`. It was launched at `started` (s), `from_idle` while nothing was under way,
    // as proposed tokens always are: a token alone took longer then. Times of the others are taken some at a time,
    // since when each comes depends on what the caller does.
    void came(size_t tokens, double now, double started, bool from_idle);
    void paused() { run_since = 0; }
    void foreseen(bool is_right);
    void judged(bool is_right);

  private:
    PairIndex index;
    RecentTimes steps[MOST + 2];       // by tokens
    double won = 0, taken = 0;         // s of this answer; `taken`: what it would have taken without, with its prompt
    double run_since = 0;              // s: since then `run` tokens came alone and without a pause; 0: none did
    int run = 0;
    int kind = 0;                      // of the last match: short, middle, long
    size_t passed = 0;                 // matches in a row of which nothing was proposed; after 64 the times are doubted
    double tried[3] = {}, hit[3] = {}; // by kind: proposed tokens that were judged

    void waited(double time);
    // Of a step with n proposed tokens. If none was measured yet: as the largest that was makes it likely; before that,
    // a token more is taken for a quarter of a step.
    double expected_time(int n) const;
    // How many tokens of up to n are worth a try.
    size_t number(int n);
};
