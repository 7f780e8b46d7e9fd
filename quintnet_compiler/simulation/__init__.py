"""Simulates a step, without devices: an event simulation of the schedule and of the functions that ranks run."""
