// train/folder.cpp: the output folder of a run: its lock, its leftovers, the checks of --resume and --overwrite.
#include "train/folder.h"
#include "base/file.h"
#include "train/tensorboard.h"
#include <cerrno>
#include <csignal>
#include <cstring>
#include <dirent.h>
#include <memory>
#include <string_view>
#include <sys/file.h>
#include <vector>

// The files that a run leaves in its folder.
static const char* const RUN_FILES[] = {
    "adapter_config.json", "adapter_model.safetensors", "model.bin", "state.safetensors", "trainer_log.jsonl",
    "loss.svg", "reward.svg", "trainer_answers.jsonl", "report.html", "best/adapter_config.json",
    "best/adapter_model.safetensors", "best/model.bin"};

RunFolder::RunFolder(const TrainOptions& options, bool locks) : o(options) {
    struct stat st;
    if (locks && stat(o.out.c_str(), &st) == 0 && S_ISDIR(st.st_mode)) take();
    check();
}

void RunFolder::open() {
    make_folder(o.out);
    if (lock < 0) take(), check(); // (another run may have created it meanwhile)
    remove_leftovers();
    for (const char* name : RUN_FILES)
        if (o.overwrite && unlink((o.out + "/" + name).c_str()) != 0 && errno != ENOENT && errno != ENOTDIR)
            DIE("%s/%s: %s", o.out.c_str(), name, strerror(errno));
}

static bool is_event_file(const std::string& name) {
    return name.compare(0, strlen(EventFile::NAME), EventFile::NAME) == 0;
}

void RunFolder::take() {
    lock = ::open(o.out.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (lock < 0) DIE("%s: %s", o.out.c_str(), strerror(errno));
    if (flock(lock, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) // (other faults: a file system without locks)
        DIE("%s: another train_lora is using it", o.out.c_str());
}

void RunFolder::check() const {
    auto exists = [&](const char* name) { return access((o.out + "/" + name).c_str(), F_OK) == 0; };
    const bool old = exists("trainer_log.jsonl") || exists("state.safetensors") || exists("adapter_config.json") ||
                     exists("model.bin");
    const char* out = o.out.c_str();
    must_be_writable("-o", o.out, true);
    if (old && !o.resume && !o.overwrite)
        DIE("%s: %s", out, exists("state.safetensors")
                               ? "holds a run: --resume continues it, --overwrite replaces it"
                               : "holds a run without a checkpoint; --overwrite replaces it");
    const std::string result = o.out + "/model.bin";
    if (o.overwrite && (same_file(o.model, result) || same_file(o.model + "/model.bin", result)))
        DIE("%s: --overwrite would remove the model that is to be trained", out);
    if (o.resume && !exists("state.safetensors"))
        DIE("%s: no run to resume: it has no state.safetensors; --overwrite begins anew", out);
}

// The process id at the end of an OutputFile's temporary name, if it is one of the run's files; 0: it is not.
static pid_t writer_of(const std::string& name) {
    for (const std::string_view file : RUN_FILES) {
        const std::string begin = std::string(file) + ".tmp";
        if (name.compare(0, begin.size(), begin) != 0 || name.size() == begin.size()) continue;
        if (name.find_first_not_of("0123456789", begin.size()) != name.npos) continue;
        return (pid_t)strtol(name.c_str() + begin.size(), nullptr, 10);
    }
    return 0;
}

void RunFolder::remove_leftovers() const {
    std::vector<std::string> dead;
    for (const std::string in : {"", "best/"}) {
        const std::unique_ptr<DIR, int (*)(DIR*)> dir(opendir((o.out + "/" + in).c_str()), closedir);
        while (const dirent* entry = dir ? readdir(dir.get()) : nullptr) {
            const pid_t writer = writer_of(in + entry->d_name);
            const bool left = writer > 0 && (writer == getpid() || (kill(writer, 0) != 0 && errno == ESRCH));
            if (left || (o.overwrite && in.empty() && is_event_file(entry->d_name)))
                dead.push_back(o.out + "/" + in + entry->d_name);
        }
    }
    for (auto& path : dead)
        if (unlink(path.c_str()) != 0 && errno != ENOENT) DIE("%s: %s", path.c_str(), strerror(errno));
}
