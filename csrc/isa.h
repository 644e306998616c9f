// The namespace of the instruction set that this translation unit is compiled for.
//
// kernels.cpp is compiled once for each set with STEPCLOCK_ISA naming it. Everything inline that it
// includes lives in that namespace, so that the linker cannot merge an AVX-512 copy into the
// baseline path. Such headers therefore use no templates of the standard library.
#pragma once

#ifndef STEPCLOCK_ISA
#define STEPCLOCK_ISA baseline
#endif

// Arithmetic that a GPU shares with the CPU.
#if defined(__CUDACC__)
#define STEPCLOCK_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define STEPCLOCK_HOST_DEVICE inline
#endif
