"""Derivatives that a module's code has itself: functions and hooks of the user's own, gradients taken in forward."""
