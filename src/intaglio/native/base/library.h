// Linkage of the functions that generated programs call. Functions that do not depend on the program are compiled once
// per instruction set, to object files that programs are linked with. A program that contains their text
// (INTAGLIO_ONE_FILE is defined) compiles them as static functions.

#pragma once

#if defined(INTAGLIO_ONE_FILE)
#define LIBRARY static __attribute__((unused, noinline))
#else
#define LIBRARY
#endif
