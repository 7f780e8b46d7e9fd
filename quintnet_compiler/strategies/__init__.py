"""Strategies of operators on a mesh axis, from their sharding rules; padding; conversions of types."""
