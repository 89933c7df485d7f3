"""States: layers that keep a recurrent state, as a step finds them. `base` is the seam between engine and layer."""
