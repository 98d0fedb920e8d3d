// Program location of an op: the chain of (code object, instruction) from the step's frame to the op, as one hash.
// Knows CPython's frame layout (3.11 to 3.13); nothing else in csrc does.
#pragma once
#include <Python.h>
#include <cstdint>
#include <vector>

namespace coexec {

// One frame of a chain. `code` is a strong reference once it is kept by the LocationTable.
struct FrameSite {
  PyCodeObject* code;
  int offset; // in bytes, as traceback's tb_lasti
};

// The frame that the chain ends with, by address: it is on the stack for as long as the step runs.
struct StepFrame {
  PyThreadState* thread = nullptr;
  void* stop = nullptr; // exclusive: the caller of a step that is a function
  void* last = nullptr; // inclusive: the frame of a step that is a block. Who resumes a coroutine's may change in it
};

// Frame of the Python function that called into native code; `levels` frames further out. Needs the GIL.
// `block`: the step is a block in that frame, otherwise a function that it calls.
StepFrame step_frame(int levels, bool block);

// Hash of the chain. Reads only frames of the calling thread, so it needs no GIL (autograd releases it in backward).
uint64_t location_hash(const StepFrame& step);
// The chain itself, innermost first. Needs the GIL (the caller keeps references).
std::vector<FrameSite> location_chain(const StepFrame& step);
// Its frames, in the same order: for `on_stack`, before Python goes on. Needs the GIL.
std::vector<const void*> location_frames(const StepFrame& step);
// What a frame has at a place of its value stack, counted from 1 at the bottom as exception tables do. Borrowed.
PyObject* on_stack(const void* frame, int depth);

inline uint64_t mix(uint64_t h, uint64_t v) {
  h = (h ^ v) * 0x9E3779B97F4A7C15ull;
  return h ^ (h >> 29);
}

// Addresses of one kind lie at regular distances: unmixed, they crowd a table, which grows to many times its contents.
struct AddressHash {
  size_t operator()(const void* p) const {
    return mix(0, reinterpret_cast<uintptr_t>(p));
  }
};

} // namespace coexec
