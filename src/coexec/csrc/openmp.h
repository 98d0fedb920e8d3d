// OpenMP keeps a pool of workers per thread that ever ran a parallel region.
#pragma once

namespace coexec {

// Ends the workers of the calling thread; its next parallel region starts new ones (some 50 us). Nothing if it has
// none.
//
// libgomp's workers spin between two regions only while the process has no more threads of OpenMP than there are cores.
// With a pool for the PythonRunner's thread and one for the GraphRunner's they sleep instead, and each region has to
// wake them: seen, with two idle pools, 1.5x on a transformer's and 2x on a small convolutional net's eager step. So
// whoever is about to do nothing gives its workers back.
void release_openmp_workers();

} // namespace coexec
