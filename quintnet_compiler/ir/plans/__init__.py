"""What plans say to features, and what features answer to all layers: fields of theirs, and what hosts hold."""
