"""What this processor lacks that tests of other engines need."""

from pathlib import Path

import pytest

FLAGS = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("flags")[2].partition("\n")[0].split())
HAS_VNNI = bool(FLAGS & {"avx512_vnni", "avx_vnni"})
"""Without VNNI, oneDNN and ONNX Runtime add pairs of int8 products in 16 bits, which saturate. intaglio's do not."""
HAS_AVX512 = "avx512f" in FLAGS

needs_vnni = pytest.mark.skipif(not HAS_VNNI, reason="without VNNI this engine's int8 kernels saturate in 16 bits")
