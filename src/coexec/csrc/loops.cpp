// Loops whose trip count varies: all passes through their ops are one stretch of the TraceGraph.
#include "step.h"

namespace coexec {
constexpr uint64_t kAnyPass = 0xA0761D6478BD642Full; // takes the place of the ordinal in the uid of a folded op

bool FoldedLoop::holds(const std::vector<FrameSite>& chain) const {
  if (chain.size() < frames.size())
    return false;
  auto frame = chain.end() - static_cast<std::ptrdiff_t>(frames.size());
  auto same = [](const FrameSite& a, const FrameSite& b) { return a.code == b.code && a.offset == b.offset; };
  return frame->code == frames[0].code && frame->offset >= first && frame->offset <= last &&
      std::equal(frame + 1, chain.end(), frames.begin() + 1, same);
}

// Where the op is, its name, and how often this pair was met before in the iteration. In a folded loop the ordinal does
// not count; nor does it in the backward pass of what a folded loop did.
OpIdentity Step::identify(const OpInfo* info, uint64_t location) {
  uint64_t pair = mix(location, info->name_hash);
  bool folded = place(location).folded || (in_backward_ && folded_uids_.count(backward_of_));
  if (!folded)
    return {location, mix(pair, recorder.occurrence(location, info->name_hash)), false};
  uint64_t uid = mix(pair, kAnyPass);
  folded_uids_.insert(uid);
  if (in_list_)
    list_uids_.insert(uid);
  return {location, uid, true};
}

void Step::fold_loop(uint64_t location, size_t depth, int first, int last) {
  auto known = locations.find(location);
  TORCH_CHECK(known != locations.end() && depth < known->second.chain.size(), "coexec: no frame ", depth,
      " is known at location ", location);
  const auto& chain = known->second.chain;
  folded_loops_.push_back({{chain.begin() + static_cast<std::ptrdiff_t>(depth), chain.end()}, first, last});
  for (auto& l : locations)
    l.second.folded |= folded_loops_.back().holds(l.second.chain);
  start_anew();
}

void Step::fold_location(uint64_t location) {
  locations.at(location).folded = true;
  start_anew();
}

void Step::fold_list(uint64_t location) {
  locations.at(location).lists_vary = true;
  fold_location(location);
}

// Nodes are numbered anew: what refers to the old ones goes with them.
void Step::start_anew() {
  graph.join_iteration();
  segments.reset();
  iterations_.clear();
  description.clear();
  path.clear();
  crowded_.clear();
  small_reads_.clear();
  timeline.clear(); // its spans have numbers of nodes that are others' from here on
  program.clear();
}

bool Step::taken(int32_t from, int32_t to) {
  const Child* c = program.at(from).child(to);
  return c && c->taken;
}

void Step::mark_unplanned(const std::vector<std::pair<int32_t, int32_t>>& edges) {
  graph.join_iteration();
  for (size_t n = 0; n < program.size(); n++)
    for (Child& c : program.at(static_cast<int32_t>(n)).children)
      c.unplanned = false;
  for (auto [from, to] : edges)
    if (Child* c = program.at(from).child(to))
      c->unplanned = true;
}

void Step::mark_loop_conds(const std::vector<int32_t>& nodes) {
  graph.join_iteration();
  for (size_t n = 0; n < program.size(); n++)
    program.at(static_cast<int32_t>(n)).loop_cond = false;
  for (int32_t n : nodes)
    program.at(n).loop_cond = true;
}
} // namespace coexec
