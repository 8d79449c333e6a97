// SIMD intrinsics of the instruction set that the file is compiled for. <immintrin.h> declares the intrinsics of all
// instruction sets, and g++ takes longer to parse it than to parse most programs. The headers that it consists of are
// known for g++ 12, so only those that are used are included there.
#pragma once

#if defined(__AVX2__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ == 12 && !defined(_IMMINTRIN_H_INCLUDED)
#define _IMMINTRIN_H_INCLUDED
#include <smmintrin.h>
// <immintrin.h> includes these after <smmintrin.h>, too.
#include <avxintrin.h>
#include <avx2intrin.h>
#include <f16cintrin.h>
#if defined(__AVX512F__)
#include <avx512fintrin.h>
typedef unsigned int __mmask32;  // declared by <avx512vlintrin.h>, half of all the text, which nothing here needs
#include <avx512bwintrin.h>
#include <avx512dqintrin.h>
#include <avx512vbmiintrin.h>
#include <avx512vnniintrin.h>
#if defined(__AMX_INT8__)
#include <amxint8intrin.h>
#include <amxtileintrin.h>
#endif
#endif
#undef _IMMINTRIN_H_INCLUDED
#elif defined(__AVX2__)
#include <immintrin.h>
#endif
