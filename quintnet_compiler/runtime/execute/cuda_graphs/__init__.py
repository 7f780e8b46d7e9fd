"""CUDA graphs of segments: what a graph can replay, its memory, and the engine that captures and replays."""
