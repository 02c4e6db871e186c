// train/folder.h: the folder that a run writes: one run at a time, and nothing left over by one that was killed.
#pragma once
#include "train/options.h"
#include <string>

// Rank 0 has one. The folder is locked until the program ends, since --merge reads it after the run.
class RunFolder {
    const TrainOptions& o;
    int lock = -1;

    void check() const;
    void take(); // the lock, of a folder that is there
    void remove_leftovers() const;

  public:
    // Throws Error where the options do not allow a run in there, or another one is at work. Makes and changes nothing.
    explicit RunFolder(const TrainOptions& options);
    // Makes the folder, if it is not there; removes what --overwrite replaces.
    void open();
};
