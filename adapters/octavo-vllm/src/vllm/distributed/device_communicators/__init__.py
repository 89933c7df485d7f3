"""Groups that carry tensors."""
