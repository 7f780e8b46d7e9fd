"""What a step will take, before anything runs: discrete events over the schedule and the functions that ranks execute."""
