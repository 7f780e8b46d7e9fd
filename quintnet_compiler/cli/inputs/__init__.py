"""What verbs are given: the options that several of them have, and the model that is their target."""
