"""Octavo's sampling parameters, which have vLLM's names."""

from octavo.request.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

__all__ = ["RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
