"""What a run leaves for people and tools: the run log (JSONL) and the live view on a terminal."""
