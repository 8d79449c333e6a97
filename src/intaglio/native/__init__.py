"""C++ sources of the runtime library, their compilation, and detection of the CPU's features."""
