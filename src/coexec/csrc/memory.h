// How the allocator treats what a step frees.
#pragma once

namespace coexec {

// Lets glibc keep freed memory for the next iteration, up to 128 MiB at the top of an arena.
//
// The GraphRunner's thread has an arena of its own. Unlike the main one, which a process has grown by the time it
// trains, it gives its heaps back whenever they fall empty, and gets fresh pages in the next iteration: seen, 600 page
// faults and 2 ms per step of a small transformer, where eager has none. Other allocators (a preloaded jemalloc) are
// not affected.
void keep_freed_memory();

// Gives back what is free in all arenas now: a thread that has computed so far, and lets another one compute from here
// on, holds a step's worth of free memory that the other one's arena cannot use. Takes some milliseconds.
void give_freed_memory_back();

} // namespace coexec
