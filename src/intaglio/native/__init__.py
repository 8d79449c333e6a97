"""C++ sources that programs are linked with, their compilation, and what this CPU can do."""
