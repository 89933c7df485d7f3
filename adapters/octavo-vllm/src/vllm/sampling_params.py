"""Octavo's sampling parameters, which have vLLM's names."""

from octavo import RepetitionDetectionParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

__all__ = ["RepetitionDetectionParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
