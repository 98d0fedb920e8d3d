#include "expression.h"
#include <algorithm>

namespace coexec {
namespace {
using Value = std::optional<int64_t>;

Value floor_divide(int64_t a, int64_t b) {
  if (b == 0)
    return std::nullopt;
  int64_t q = a / b;
  return q * b != a && (a < 0) != (b < 0) ? q - 1 : q;
}

Value apply(Token t, int64_t a, int64_t b) {
  int64_t r = 0;
  switch (t) {
    case Token::Add:
      return __builtin_add_overflow(a, b, &r) ? std::nullopt : Value(r);
    case Token::Multiply:
      return __builtin_mul_overflow(a, b, &r) ? std::nullopt : Value(r);
    case Token::FloorDivide:
      return floor_divide(a, b);
    case Token::Modulo: { // of the sign of b, as Python's
      auto q = floor_divide(a, b);
      return q ? Value(a - b * *q) : q;
    }
    case Token::Maximum:
      return std::max(a, b);
    case Token::Minimum:
      return std::min(a, b);
    case Token::Equal:
      return a == b;
    case Token::NotEqual:
      return a != b;
    case Token::Less:
      return a < b;
    case Token::LessEqual:
      return a <= b;
    case Token::And:
      return a && b;
    case Token::Or:
      return a || b;
    default:
      return std::nullopt;
  }
}
} // namespace

std::optional<int64_t> evaluate(const Expression& e, const std::vector<int64_t>& symbols) {
  int64_t stack[64];
  size_t n = 0;
  for (const auto& [token, value] : e) {
    if (token == Token::Constant || token == Token::Symbol) {
      if (n == 64 || (token == Token::Symbol && static_cast<size_t>(value) >= symbols.size()))
        return std::nullopt;
      stack[n++] = token == Token::Constant ? value : symbols[value];
    } else if (token == Token::Not) {
      if (n < 1)
        return std::nullopt;
      stack[n - 1] = !stack[n - 1];
    } else {
      if (n < 2)
        return std::nullopt;
      n--;
      auto r = apply(token, stack[n - 1], stack[n]);
      if (!r)
        return std::nullopt;
      stack[n - 1] = *r;
    }
  }
  return n == 1 ? Value(stack[0]) : std::nullopt;
}

bool Pattern::agrees(const std::vector<int64_t>& now, const std::vector<Expression>& expressions,
    const std::vector<int64_t>& symbols) const {
  if (facts.empty())
    return true;
  if (now.size() != facts.size())
    return false;
  size_t f = 0, s = 0;
  for (size_t k = 0; k < now.size(); k++) {
    auto at = static_cast<int32_t>(k);
    if (f < free.size() && free[f] == at) {
      f++;
    } else if (s < following.size() && following[s].first == at) {
      if (evaluate(expressions[following[s++].second], symbols) != now[k])
        return false;
    } else if (now[k] != facts[k]) {
      return false;
    }
  }
  return true;
}
} // namespace coexec
