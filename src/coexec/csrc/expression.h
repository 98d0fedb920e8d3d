// Integers that follow the sizes of a segment's inputs, as a compiled artifact with symbolic sizes knows them.
#pragma once
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace coexec {

// Same numbers as coexec.backends.expressions.Token.
enum class Token : int64_t {
  Constant = 0,
  Symbol = 1,
  Add = 2,
  Multiply = 3,
  FloorDivide = 4,
  Modulo = 5,
  Maximum = 6,
  Minimum = 7,
  Equal = 8,
  NotEqual = 9,
  Less = 10,
  LessEqual = 11,
  And = 12,
  Or = 13,
  Not = 14,
};

// In postfix order: (token, value); the value counts for Constant and Symbol only.
using Expression = std::vector<std::pair<Token, int64_t>>;

// Nothing if the expression is malformed, divides by zero or overflows.
std::optional<int64_t> evaluate(const Expression& e, const std::vector<int64_t>& symbols);

// A list of integers of which some follow symbols and some are free. An empty one allows everything.
struct Pattern {
  std::vector<int64_t> facts; // as they were when the artifact was made
  std::vector<std::pair<int32_t, int32_t>> following; // (position in facts, expression of the segment), by position
  std::vector<int32_t> free; // positions that may hold anything, ascending

  bool agrees(const std::vector<int64_t>& now, const std::vector<Expression>& expressions,
      const std::vector<int64_t>& symbols) const;
};

} // namespace coexec
