"""The models of far_away."""
