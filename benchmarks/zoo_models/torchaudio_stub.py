"""torchaudio beside a CPU build of PyTorch: its models do not need its compiled extension, which does not load."""

from __future__ import annotations

import sys
import types


def leave_out_extension() -> None:
    """Replace the compiled extension of torchaudio by an empty module. Transformers imports torchaudio, too."""
    extension = types.ModuleType("torchaudio._extension")
    extension.__dict__.update(
        _IS_TORCHAUDIO_EXT_AVAILABLE=False,
        _IS_ALIGN_AVAILABLE=False,
        _IS_RIR_AVAILABLE=False,
        fail_if_no_align=lambda function: function,
        fail_if_no_rir=lambda function: function,
    )
    sys.modules.setdefault("torchaudio._extension", extension)
