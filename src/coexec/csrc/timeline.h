// What the two runners did when in the latest co-executed calls, for `step.timeline()` (the breakdown of the paper's
// Figure 6). Always noted: a span costs a few nanoseconds beside clock readings that are taken anyway.
#pragma once
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

namespace coexec {
using Clock = std::chrono::steady_clock;

struct Span {
  enum class Kind : uint8_t { Wait, Op, Replayed, Segment };
  Kind kind;
  uint8_t why; // of the PythonRunner's wait: a Wait
  int32_t node; // the op, or the first one; -1 if none
  uint64_t location; // of the PythonRunner's wait
  int64_t ops;
  Clock::time_point start, end;
};

// One call. Each list is written by one runner, and read when it is over.
struct CallSpans {
  static constexpr size_t kMost = 1 << 13; // later ones of a call are left out
  Clock::time_point start, end;
  bool over = false; // neither runner writes any more: a call that returned early is over later
  std::vector<Span> python, graph;

  static void add(std::vector<Span>& to, const Span& span) {
    if (to.size() < kMost)
      to.push_back(span);
  }
  // An op that was replayed. Short ones in a row are one span.
  void add_op(int32_t node, Clock::time_point op_start, Clock::time_point op_end) {
    constexpr auto kShort = std::chrono::microseconds(20);
    bool is_short = op_end - op_start < kShort;
    if (is_short && !graph.empty() && graph.back().kind == Span::Kind::Replayed &&
        op_start - graph.back().end < kShort) {
      graph.back().end = op_end;
      graph.back().ops++;
      return;
    }
    add(graph, {is_short ? Span::Kind::Replayed : Span::Kind::Op, 0, node, 0, 1, op_start, op_end});
  }
};

// Changed and read with the GIL, but for the lists of the call that is under way.
class Timeline {
 public:
  std::shared_ptr<CallSpans> begin_call() {
    constexpr size_t kCalls = 10;
    std::shared_ptr<CallSpans> spans;
    if (calls_.size() == kCalls) {
      spans = std::move(calls_.front());
      calls_.pop_front();
    }
    if (!spans || spans.use_count() > 1) // a runner that is cancelled still has it
      spans = std::make_shared<CallSpans>();
    spans->python.clear();
    spans->graph.clear();
    spans->start = spans->end = Clock::now();
    spans->over = false;
    calls_.push_back(spans);
    return spans;
  }
  void returned() {
    if (!calls_.empty())
      calls_.back()->end = Clock::now();
  }
  void over() {
    if (calls_.empty())
      return;
    auto& call = *calls_.back();
    if (call.end == call.start)
      returned();
    call.over = true;
  }
  std::vector<std::shared_ptr<const CallSpans>> calls() const {
    std::vector<std::shared_ptr<const CallSpans>> over;
    for (const auto& call : calls_)
      if (call->over)
        over.push_back(call);
    return over;
  }
  void clear() {
    calls_.clear();
  }

 private:
  std::deque<std::shared_ptr<CallSpans>> calls_; // the oldest first
};
} // namespace coexec
