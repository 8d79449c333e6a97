"""Steps of decoders with a key-value cache: the float modules that programs are made from, their calls, the memory of
caches, and how programs are run.
"""
