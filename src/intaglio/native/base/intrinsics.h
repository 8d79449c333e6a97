// Vector instructions of the set that is compiled for. <immintrin.h> declares those of every set, which takes g++
// longer to read than most programs. Of the version of g++ whose parts of it are known, only those that are used here
// are read.
#pragma once

#if defined(__AVX2__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ == 12 && !defined(_IMMINTRIN_H_INCLUDED)
#define _IMMINTRIN_H_INCLUDED
#include <smmintrin.h>
// after <smmintrin.h>, as <immintrin.h> has them
#include <avxintrin.h>
#include <avx2intrin.h>
#include <f16cintrin.h>
#if defined(__AVX512F__)
#include <avx512fintrin.h>
#include <avx512vlintrin.h>
#include <avx512bwintrin.h>
#include <avx512dqintrin.h>
#include <avx512vlbwintrin.h>
#include <avx512vbmiintrin.h>
#include <avx512vnniintrin.h>
#endif
#undef _IMMINTRIN_H_INCLUDED
#elif defined(__AVX2__)
#include <immintrin.h>
#endif
