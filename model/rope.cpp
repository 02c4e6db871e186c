// model/rope.cpp: rope_scaling and rope_parameters of a config.
#include "model/rope.h"
#include "base/error.h"
#include "sj.h"
#include <set>

namespace {
constexpr int MOST_POSITIONS = 1 << 24;

struct RopeType {
    RopeScaling::Type type;
    const char* name;
    std::set<std::string> keys; // besides those of all types
};
const RopeType ROPE_TYPES[] = {
    {RopeScaling::NONE, "default", {}},
    {RopeScaling::LINEAR, "linear", {"factor"}},
    {RopeScaling::LLAMA3, "llama3",
     {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}},
    {RopeScaling::YARN, "yarn",
     {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
      "mscale_all_dim", "truncate"}}};

// One of the two objects.
struct RopeObject {
    std::string file, key; // key: in the config
    sj::Value object;

    [[noreturn]] void refuse(const std::string& name, const std::string& why) const {
        DIE("%s: config has %s.%s = %.60s, which is %s", file.c_str(), key.c_str(), name.c_str(),
            std::string(object[name].raw()).c_str(), why.c_str());
    }
    bool has(const char* name) const { return object[name] && !object[name].is(sj::Null); }
    double number(const char* name, double low, double high) const {
        if (!has(name)) DIE("%s: config has no %s.%s", file.c_str(), key.c_str(), name);
        const double x = object[name].number(NAN);
        if (!(x >= low && x <= high)) refuse(name, format("not a number from %g to %g", low, high));
        return x;
    }
    double number(const char* name, double low, double high, double otherwise) const {
        return has(name) ? number(name, low, high) : otherwise;
    }
    const RopeType& type() const {
        const char* name = has("rope_type") ? "rope_type" : "type"; // the second is its older name
        const std::string found = object[name].str(has(name) ? "" : "default");
        if (has("type") && object["type"].str() != found) refuse("type", "not its rope_type");
        for (const RopeType& t : ROPE_TYPES) if (found == t.name) return t;
        refuse(name, "not supported");
    }
    void check_keys(const RopeType& type) const {
        for (auto [name, value] : object.members()) {
            const bool known = name == "rope_type" || name == "type" || name == "rope_theta" || type.keys.count(name) ||
                               (name == "partial_rotary_factor" && value.number() == 1);
            if (!known) refuse(name, "not supported");
        }
    }
    void read_original(RopeScaling& s, sj::Value config, int max_positions) const {
        const char* name = "original_max_position_embeddings";
        const sj::Value alone = config[name]; // it comes first, as in Hugging Face
        int64_t n = max_positions;
        if (alone ? !alone.integer(&n) : has(name) && !object[name].integer(&n)) n = 0;
        if (n < 1 || n > MOST_POSITIONS)
            DIE("%s: config: %s is not an integer from 1 to %d", file.c_str(), name, MOST_POSITIONS);
        s.original = (int)n;
    }
    void read_yarn(RopeScaling& s, int D, double theta) const {
        s.fast = number("beta_fast", 1e-6, 1e6, 32), s.slow = number("beta_slow", 1e-6, 1e6, 1);
        if (s.fast <= s.slow) DIE("%s: config: %s.beta_fast is not above beta_slow", file.c_str(), key.c_str());
        if (has("truncate") && !object["truncate"].is_bool()) refuse("truncate", "neither true nor false");
        s.truncate = object["truncate"].boolean(true);
        const double m = number("mscale", 0, 100, 0), all = number("mscale_all_dim", 0, 100, 0);
        auto grows = [&](double by) { return 0.1 * by * std::log(s.factor) + 1; };
        s.attention = number("attention_factor", 1e-3, 1e3, m != 0 && all != 0 ? grows(m) / grows(all) : grows(1));
        const auto [low, high] = s.range(D, theta);
        if (!(low < high))
            DIE("%s: config: %s: no plane of RoPE turns in %d positions", file.c_str(), key.c_str(), s.original);
    }
};
} // namespace

RopeScaling parse_rope(const std::string& file, const sj::Value& config, int D, int max_positions, double& theta) {
    RopeObject from = {file, "rope_parameters", config["rope_parameters"]};
    const sj::Value older = config["rope_scaling"];
    const bool given = from.object && !from.object.is(sj::Null);
    if (older && !older.is(sj::Null) && !older.is(sj::False)) {
        if (given) DIE("%s: config has both rope_scaling and rope_parameters", file.c_str());
        from = {file, "rope_scaling", older};
    } else if (!given) from.object = {};
    if (from.object && !from.object.is(sj::Object))
        DIE("%s: config has %s = %.60s, which is not supported", file.c_str(), from.key.c_str(),
            std::string(from.object.raw()).c_str());
    const sj::Value number = from.object["rope_theta"] ? from.object["rope_theta"] : config["rope_theta"];
    if (!number.is(sj::Number)) DIE("%s: config has no rope_theta", file.c_str());
    theta = number.number();
    if (!(theta >= 1 && theta < 1e12)) DIE("%s: config: rope_theta is not between 1 and 1e12", file.c_str());
    const RopeType& type = from.type();
    from.check_keys(type);
    RopeScaling s;
    s.type = type.type;
    if (s.type == RopeScaling::NONE) return s;
    s.factor = from.number("factor", 1, 1024);
    if (s.type != RopeScaling::LINEAR) from.read_original(s, config, max_positions);
    if (s.type == RopeScaling::YARN) from.read_yarn(s, D, theta);
    if (s.type == RopeScaling::LLAMA3) {
        s.slow = from.number("low_freq_factor", 1e-6, 1e6), s.fast = from.number("high_freq_factor", 1e-6, 1e6);
        if (s.fast <= s.slow) from.refuse("high_freq_factor", "not above low_freq_factor");
    }
    return s;
}

int RopeScaling::reach(int max_positions) const {
    return std::max(max_positions, (int)std::min(factor * original, (double)MOST_POSITIONS));
}

std::string RopeScaling::note() const {
    if (type == NONE) return "";
    const std::string positions = original ? format(" x %d positions", original) : "";
    return format(", RoPE by %s, %g%s", ROPE_TYPES[type].name, factor, positions.c_str());
}
