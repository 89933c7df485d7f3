"""Families whose layers differ in what mixes their tokens: attention, a state, or nothing."""
