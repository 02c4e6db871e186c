// train/folder.h: the output folder of a run: one run at a time, and no leftovers of a killed run.
#pragma once
#include "train/options.h"
#include <string>

// Rank 0 has one. The folder stays locked until the program ends, since --merge reads it after the run.
class RunFolder {
    const TrainOptions& o;
    int lock = -1;

    void check() const;
    void take(); // the lock, if the folder exists
    void remove_leftovers() const;

  public:
    // Throws Error if the options do not allow a run in this folder, or another run uses it. Changes nothing.
    // locks: else it is checked only.
    explicit RunFolder(const TrainOptions& options, bool locks = true);
    // Creates the folder if it is missing; removes files that --overwrite replaces.
    void open();
};
