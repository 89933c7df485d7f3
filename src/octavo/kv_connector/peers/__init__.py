"""What engines that pass blocks on tell each other: their caches, the mapping between two, and what is on offer."""
