// Places of a program by value. A string that is evaluated in each iteration is compiled anew each time: its code is
// another object at another address, but the same place.
#pragma once
#include <c10/util/flat_hash_map.h>
#include "location.h"

namespace coexec {

class Places {
 public:
  Places() = default;
  Places(const Places&) = delete;
  Places& operator=(const Places&) = delete;
  ~Places(); // needs the GIL
  // `location`, the location_hash of the frames above `step`, or the one of the first chain that had equal code at the
  // same instructions. Needs no GIL; takes it for a chain never seen.
  uint64_t first_like(uint64_t location, const StepFrame& step);
  // Lets go of code that only repeats other code; before an iteration, with the GIL.
  void forget_repetitions();

 private:
  struct Code {
    uint64_t value; // of name, file, line, instructions and constants
    bool kept; // part of a place of its own: its address stays unique; the others live until the next iteration
  };
  uint64_t value_of(PyCodeObject* code);

  ska::flat_hash_map<uint64_t, uint64_t> first_; // by location
  ska::flat_hash_map<uint64_t, uint64_t> by_value_; // first location with these values
  ska::flat_hash_map<PyCodeObject*, Code> codes_; // strong references
  std::vector<uint64_t> repetitions_; // locations that are not their own first_
};

} // namespace coexec
