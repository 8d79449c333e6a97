// Functions that programs call and that do not depend on them are compiled once per instruction set, to object files
// that programs are linked with. A program that carries its own text instead (INTAGLIO_ONE_FILE) has them as its own.

#pragma once

#if defined(INTAGLIO_ONE_FILE)
#define LIBRARY static __attribute__((unused, noinline))
#else
#define LIBRARY
#endif
