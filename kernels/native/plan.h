// Makes the work list of attention for one KV group of a step.
#pragma once

#include <vector>

#include "items.h"

// Kept from step to step: it allocates nothing once the sizes have been met.
struct GroupPlan {
    std::vector<Item> items;           // the longest first
    std::vector<int64_t> token_slots;  // empty: not planned yet
    bool has_parts = false;
    int64_t num_partials = 0;  // rows

    void clear();

    // For operations with these heads. How items are cut has no influence on results.
    void make(const hr_step& step, const hr_group& group, const hr_op& op, int num_threads);

  private:
    void add(Item item, int64_t window, int64_t rows, bool is_split);
};
