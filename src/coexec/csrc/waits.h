// How often and how long Python waited for the graph, by reason and by the place that needed it.
#pragma once
#include <c10/util/flat_hash_map.h>
#include "iteration.h"

namespace coexec {
class WaitLog {
 public:
  struct Total {
    int64_t count = 0;
    double seconds = 0;
  };
  // `location`: of the op that waited (Step::locations); 0 where it is none of the user's lines. There are at most as
  // many as the graph has ops.
  void add(Wait why, uint64_t location, double seconds, int64_t count = 1) {
    auto& t = by_place_[static_cast<int>(why)][location];
    t.count += count;
    t.seconds += seconds;
  }
  const ska::flat_hash_map<uint64_t, Total>& of(Wait why) const {
    return by_place_[static_cast<int>(why)];
  }
  double seconds(Wait why) const {
    double s = 0;
    for (const auto& [location, total] : of(why))
      s += total.seconds;
    return s;
  }
  double seconds() const {
    double s = 0;
    for (int why = 0; why < static_cast<int>(Wait::Count); why++)
      s += seconds(static_cast<Wait>(why));
    return s;
  }

 private:
  ska::flat_hash_map<uint64_t, Total> by_place_[static_cast<int>(Wait::Count)];
};
} // namespace coexec
