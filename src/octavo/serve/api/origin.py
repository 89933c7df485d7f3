"""What a choice says of where its tokens came from: which weights drew them, from what, and by which experts.

Owns the forms in which vLLM's and SGLang's clients read these. Invariant: what was not asked for is not there.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np

from octavo.request.outputs import CompletionOutput
from octavo.serve.api.shapes import Origin


def spans_of(completion: CompletionOutput) -> list[dict[str, Any]]:
    """Which weights drew the tokens that are told, counted from the completion's first."""
    return [
        {"version": span.version, "start": span.start, "end": span.end, **({"mixed": True} if span.mixed else {})}
        for span in completion.weight_versions
    ]


def npy_of(experts: Any) -> str:
    """An array as vLLM writes it: the bytes of a .npy file, in base64."""
    file = io.BytesIO()
    np.save(file, experts)
    return base64.b64encode(file.getvalue()).decode()


def int32_of(experts: Any) -> str:
    """An array as SGLang writes it: its values as int32, in base64."""
    return base64.b64encode(experts.astype("<i4").tobytes()).decode()


def tell_origin(choice: Origin, completion: CompletionOutput, *, versions: bool) -> None:
    """Say in `choice` what `completion` knows."""
    if versions:
        choice.weight_versions = spans_of(completion)
    if completion.sampling_mask is not None:
        choice.sampling_mask = completion.sampling_mask
    if completion.routed_experts is not None:
        choice.routed_experts = npy_of(completion.routed_experts)
