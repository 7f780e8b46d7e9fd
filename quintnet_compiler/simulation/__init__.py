"""What a step takes, before anything runs: events over the schedule and the functions that ranks execute."""
