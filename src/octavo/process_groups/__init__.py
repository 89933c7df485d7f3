"""What whoever moves bytes by torch's process groups shares: what goes wrong in a group ends that group alone."""
