"""What sharding rules mean on a mesh: strategies of operators and experts, padding, and conversions of types."""
