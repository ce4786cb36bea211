// Programmatic dependent launch (sm_90 and newer): a kernel may be scheduled while its predecessor in
// the stream still runs. Both are no-ops in a launch without the attribute.
#pragma once
#include "common/types.cuh"

// Waits until the predecessor has completed and its writes are visible. Every thread of every CTA
// calls it before it reads what the predecessor may have written, or writes what that may read, and
// before it exits: completion is passed on by nothing else. A kernel that reads the caller's arrays
// before it has a predecessor that was launched without the attribute, or behind such a one.
DEVICE void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The same, once these are computed, of which one is not 0: the compiler would put arithmetic that
// takes no memory behind the wait.
template <class... Known>
DEVICE void wait_for_predecessor_with(Known... known) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .pred p; setp.eq.u64 p, %0, 0; @p exit;}" ::"l"((u64(known) | ...)));
#endif
    wait_for_predecessor();
}

// Lets the successor be scheduled; it waits for this kernel's end by itself.
DEVICE void release_successor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
